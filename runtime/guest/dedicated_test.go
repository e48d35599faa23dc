package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/doze-run/doze/testkit"
)

func TestEventStreamEndsWithItsContextAndWithClose(t *testing.T) {
	c := scriptedGuest(t, func(_ *http.Request, conn net.Conn) {
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		gone(conn)
	})
	for name, tc := range map[string]struct {
		end  func(cancel context.CancelFunc, s *EventStream)
		want error
	}{
		"context": {func(cancel context.CancelFunc, _ *EventStream) { cancel() }, context.Canceled},
		"close":   {func(_ context.CancelFunc, s *EventStream) { s.Close() }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s, err := c.Events(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			ended := make(chan error, 1)
			go func() { _, err := s.Next(); ended <- err }() // ends with the stream
			tc.end(cancel, s)
			if err := testkit.Receive(t, "the end of Next", ended); err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

func TestEventStreamThatDoesNotBeginIsLeft(t *testing.T) {
	c := scriptedGuest(t, func(_ *http.Request, conn net.Conn) { gone(conn) })
	c.timeout = 20 * time.Millisecond
	ended := make(chan error, 1)
	go func() { _, err := c.Events(t.Context()); ended <- err }() // ends with the test
	if err := testkit.Receive(t, "the end of Events", ended); !errors.Is(err, ErrNoResponse) {
		t.Errorf("got %v, want ErrNoResponse", err)
	}
}
