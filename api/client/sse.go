package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// maxMessage limits one server-sent event. A node sends at most 64 KiB of output
// in one, which JSON may make six times as long.
const maxMessage = 8 << 20

// errEnd ends stream.each without an error.
var errEnd = errors.New("end of stream")

// message is one server-sent event.
type message struct {
	event string
	data  []byte
}

func (m message) decode(into any) error {
	if err := json.Unmarshal(m.data, into); err != nil {
		return fmt.Errorf("unexpected data of an event %q: %w", m.event, err)
	}
	return nil
}

func (m message) output() ([]byte, error) {
	var o types.Output
	if err := m.decode(&o); err != nil {
		return nil, err
	}
	return decodeText(o.Data, o.Encoding)
}

// decodeText returns the bytes of text in the API's encoding.
func decodeText(text string, encoding types.Encoding) ([]byte, error) {
	switch encoding {
	case "", types.EncodingUTF8:
		return []byte(text), nil
	case types.EncodingBase64:
		return base64.StdEncoding.DecodeString(text)
	}
	return nil, fmt.Errorf("unknown encoding %q of output", encoding)
}

// stream reads server-sent events (WHATWG HTML, section 9.2).
type stream struct {
	ctx  context.Context
	body io.ReadCloser
	scan *bufio.Scanner
}

func (c *Client) openStream(ctx context.Context, r request) (*stream, error) {
	r.accept = "text/event-stream"
	r.method = http.MethodGet
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind != r.accept {
		resp.Body.Close()
		return nil, fmt.Errorf("%s %s responded with %s and not with a stream of events", r.method, r.path, contentName(kind))
	}
	return newStream(ctx, resp), nil
}

func newStream(ctx context.Context, resp *http.Response) *stream {
	s := &stream{ctx: ctx, body: resp.Body, scan: bufio.NewScanner(resp.Body)}
	s.scan.Buffer(make([]byte, 0, 64<<10), maxMessage)
	return s
}

func (s *stream) Close() error { return s.body.Close() }

// follow makes the call and yields the data of each event of its stream.
func follow[T any](ctx context.Context, c *Client, r request, yield func(T) error) error {
	stream, err := c.openStream(ctx, r)
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		var data T
		if err := m.decode(&data); err != nil {
			return err
		}
		return yield(data)
	})
}

// each calls fn with every message until the stream ends, which returns nil, or
// fn returns an error. An event "error" is returned as *problem.Problem.
func (s *stream) each(fn func(message) error) error {
	for {
		m, err := s.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if m.event == "error" {
			p := &problem.Problem{}
			if err := m.decode(p); err != nil {
				return err
			}
			return p
		}
		if err := fn(m); err != nil {
			if err == errEnd {
				return nil
			}
			return err
		}
	}
}

// next returns the next message with data. It ignores an incomplete one.
func (s *stream) next() (message, error) {
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
