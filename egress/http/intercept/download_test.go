package intercept

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/doze-run/doze/problem"
)

// The body of a large response is read ahead, and its pieces are gathered. Neither may
// delay data that has arrived while no more follows.
func TestLargeResponseIsNotDelayed(t *testing.T) {
	first, rest := make([]byte, readAheadAfter+5*aheadSize+7), make([]byte, 3*aheadSize+11)
	_, _ = rand.Read(first)
	_, _ = rand.Read(rest)
	for name, options := range map[string][]option{
		"as it is": nil, "filtered": {filtered(copying{})}, "piece by piece": {crowded},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, major int) {
				goOn := make(chan struct{})
				r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Trailer", "Last")
					_, _ = w.Write(first)
					_ = http.NewResponseController(w).Flush()
					<-goOn
					_, _ = w.Write(rest)
					w.Header().Set("Last", "words")
				}), options...)
				res, err := r.client(major).Get("https://" + host + "/")
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				got := make([]byte, len(first))
				_, err = io.ReadFull(res.Body, got)
				close(goOn)
				if err != nil || !bytes.Equal(got, first) {
					t.Fatalf("the first bytes: %v", err)
				}
				if got, err = io.ReadAll(res.Body); err != nil || !bytes.Equal(got, rest) {
					t.Errorf("the rest: %d bytes, %v", len(got), err)
				}
				if res.Trailer.Get("Last") != "words" {
					t.Errorf("trailers %v", res.Trailer)
				}
				if result := <-r.results; result.Err != nil || result.BytesIn != int64(len(first)+len(rest)) {
					t.Errorf("%+v", result)
				}
			})
		})
	}
}

// crowded occupies all slots for reading ahead.
func crowded(r *rig, _ *Destination, _ *UpstreamConfig) { r.crowded = true }

func TestLargeResponseEndsWithItsClient(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		ended := make(chan error, 1)
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			var err error
			for err == nil {
				_, err = w.Write(make([]byte, aheadSize))
			}
			ended <- err
		}))
		res, err := r.client(major).Get("https://" + host + "/")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(io.Discard, res.Body, 2*readAheadAfter); err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if err := <-ended; err == nil {
			t.Error("the host may go on")
		}
		var f *Failure
		if result := <-r.results; !errors.As(result.Err, &f) || f.Code != problem.ClientDisconnected {
			t.Errorf("%+v", result)
		}
	})
}

func TestBrokenLargeResponseIsAborted(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 2*readAheadAfter))
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		res, err := r.client(major).Get("https://" + host + "/")
		if err == nil {
			_, err = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		if err == nil {
			t.Error("the client considers the response complete")
		}
		var f *Failure
		if result := <-r.results; !errors.As(result.Err, &f) || f.Code != problem.UpstreamDisconnected || result.Status != 200 {
			t.Errorf("%+v", result)
		}
	})
}

// noted is a connection that records writes, or fails them with err.
type noted struct {
	net.Conn
	writes [][]byte
	err    error
}

func (r *noted) Write(b []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	r.writes = append(r.writes, bytes.Clone(b))
	return len(b), nil
}

func TestWireGathersUntilUncork(t *testing.T) {
	to := &noted{}
	w := &wire{Conn: to}
	w.cork()
	var sent []byte
	for i, size := range []int{1, recordSize, maxGathered - recordSize, 10, 2 * maxGathered, 3} {
		b := bytes.Repeat([]byte{byte('a' + i)}, size)
		sent = append(sent, b...)
		if n, err := w.Write(b); n != size || err != nil {
			t.Fatalf("writing %d bytes: %d, %v", size, n, err)
		}
		if i == 1 && len(to.writes) > 0 {
			t.Error("it was not gathered")
		}
	}
	if err := w.uncork(); err != nil {
		t.Fatal(err)
	}
	if got := bytes.Join(to.writes, nil); !bytes.Equal(got, sent) {
		t.Errorf("%d bytes of %d came, or in another order", len(got), len(sent))
	}
	before := len(to.writes)
	if _, _ = w.Write([]byte("x")); len(to.writes) != before+1 {
		t.Error("it still gathers after uncork")
	}
	w.cork()
	_, _ = w.Write([]byte("y"))
	to.err = net.ErrClosed
	if err := w.uncork(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("release: %v", err)
	}
}
