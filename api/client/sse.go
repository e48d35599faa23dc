package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"

	"github.com/doze-run/doze/problem"
)

// maxMessage limits one server-sent event. A node sends at most 64 KiB of output
// in one, which JSON may make six times as long, and a value of code of up to 16 MiB.
const maxMessage = 20 << 20

// message is one server-sent event.
type message struct {
	event string
	data  []byte
}

// decode returns the data of a message.
func decode[T any](m message) (data T, err error) {
	if err := json.Unmarshal(m.data, &data); err != nil {
		return data, fmt.Errorf("unexpected data of an event %q: %w", m.event, err)
	}
	return data, nil
}

// yieldData calls yield with the data of a message.
func yieldData[T any](m message, yield func(T) error) error {
	data, err := decode[T](m)
	if err != nil {
		return err
	}
	return yield(data)
}

// follow makes the call and yields the data of each event of its stream.
func follow[T any](ctx context.Context, c *Client, r request, yield func(T) error) error {
	return c.stream(ctx, r, func(m message) error { return yieldData(m, yield) })
}

// fetchProgress makes the call and returns its JSON response. With progress, which may be nil, the
// response is a stream: progress is called with the data of each event progress, and the result is
// the data of complete.
func fetchProgress[T, P any](ctx context.Context, c *Client, r request, progress func(P)) (result T, err error) {
	if progress == nil {
		return fetch[T](ctx, c, r)
	}
	ended := false
	err = c.stream(ctx, r, func(m message) error {
		switch m.event {
		case "progress":
			return yieldData(m, func(p P) error {
				progress(p)
				return nil
			})
		case "complete":
			ended = true
			result, err = decode[T](m)
			return err
		}
		return nil // of a later version
	})
	if err == nil && !ended {
		err = errNoResult
	}
	return result, err
}

// stream makes the call and yields the events of its response until they end, which
// returns nil, or yield returns an error. An event "problem" is returned as *problem.Problem.
func (c *Client) stream(ctx context.Context, r request, yield func(message) error) error {
	r.accept = "text/event-stream"
	resp, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind != r.accept {
		return fmt.Errorf("%s %s responded with %s and not with a stream of events", resp.Request.Method, r.path, contentName(kind))
	}
	return readEvents(ctx, resp.Body, yield)
}

func readEvents(ctx context.Context, body io.Reader, yield func(message) error) error {
	events := eventReader{ctx, bufio.NewScanner(body)}
	events.scan.Buffer(make([]byte, 0, 64<<10), maxMessage)
	for {
		m, err := events.next()
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		case m.event == "problem":
			p, err := decode[problem.Problem](m)
			if err != nil {
				return err
			}
			return &p
		}
		if err := yield(m); err != nil {
			return err
		}
	}
}

// eventReader reads server-sent events (WHATWG HTML, section 9.2).
type eventReader struct {
	ctx  context.Context
	scan *bufio.Scanner
}

// next returns the next message with data. It ignores an incomplete one.
func (s eventReader) next() (message, error) {
	var m message
	size := 0
	for s.scan.Scan() {
		line := s.scan.Bytes()
		if size += len(line); size > maxMessage {
			return message{}, fmt.Errorf("an event has more than %d MiB", maxMessage>>20)
		}
		if len(line) == 0 {
			if m.data == nil {
				m, size = message{}, 0
				continue
			}
			return m, nil
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "event":
			m.event = string(value)
		case "data":
			if m.data != nil {
				m.data = append(m.data, '\n')
			}
			m.data = append(m.data, value...)
		}
	}
	if s.ctx.Err() != nil {
		return message{}, s.ctx.Err()
	}
	if err := s.scan.Err(); err != nil {
		return message{}, fmt.Errorf("the stream ended early: %w", err)
	}
	return message{}, io.EOF
}
