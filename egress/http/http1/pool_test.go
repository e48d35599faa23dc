package http1_test

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/egress/http/http1"
)

func TestPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := http1.NewPool(4, 2, time.Minute)
		conns := map[string]net.Conn{}
		put := func(key, name string) {
			here, there := net.Pipe()
			conns[name] = there
			p.Put(key, http1.NewConn(here, here, 1<<10))
		}
		closed := func(name string) bool {
			conns[name].SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := conns[name].Read(make([]byte, 1))
			return err == io.EOF
		}
		put("a", "a1")
		put("a", "a2")
		put("a", "a3") // one too many under a
		put("b", "b1")
		put("c", "c1")
		put("d", "d1") // one too many in all
		for name, want := range map[string]bool{"a1": true, "a2": true, "a3": false, "b1": false, "c1": false, "d1": false} {
			if closed(name) != want {
				t.Errorf("%s: closed %v", name, !want)
			}
		}
		if c := p.Get("a"); c == nil || p.Get("a") != nil || p.Get("x") != nil {
			t.Error("a has another number of connections")
		} else {
			time.Sleep(30 * time.Second)
			p.Put("a", c)
		}
		time.Sleep(31 * time.Second)
		for name, want := range map[string]bool{"a3": false, "b1": true, "c1": true, "d1": true} {
			if closed(name) != want {
				t.Errorf("after a minute %s: closed %v", name, !want)
			}
		}
		time.Sleep(time.Minute)
		if !closed("a3") {
			t.Error("the last does not expire")
		}
		put("a", "a4")
		p.CloseIdle()
		if !closed("a4") {
			t.Error("CloseIdle leaves one")
		}
		time.Sleep(2 * time.Minute) // the timer ends, too
	})
}
