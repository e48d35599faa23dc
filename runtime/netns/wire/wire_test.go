package wire_test

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/netns/wire"
)

func TestRequestsSurviveTheWire(t *testing.T) {
	for _, want := range []wire.Request{
		{Op: wire.OpSocket6, Seq: 1, PID: 4242, ID: "k3f9x2m7q1az", Cgroup: "/doze/sandboxes/k3f9x2m7q1az"},
		{Op: wire.OpForget, Seq: 1<<32 - 1, ID: "k3f9x2m7q1az"},
		{Op: wire.OpTUN, Seq: 2, PID: 4242, ID: "k3f9x2m7q1az", Cgroup: "/doze/sandboxes/k3f9x2m7q1az"},
		{},
	} {
		b, err := want.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := wire.ParseRequest(b)
		if err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	if _, err := (wire.Request{ID: strings.Repeat("a", wire.MaxPacket)}).AppendTo(nil); err == nil {
		t.Error("a request beyond MaxPacket was accepted")
	}
}

func TestResponsesSurviveTheWire(t *testing.T) {
	for _, want := range []wire.Response{
		{Seq: 7},
		{Status: wire.StatusFailed, Seq: 8, Errno: 111, Text: "connection refused"},
	} {
		got, err := wire.ParseResponse(want.AppendTo(nil))
		if err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	long := wire.Response{Text: strings.Repeat("a", 2*wire.MaxPacket)}.AppendTo(nil)
	if len(long) != wire.MaxPacket {
		t.Errorf("a long response has %d bytes", len(long))
	}
}

func TestAnotherVersionIsRefusedByName(t *testing.T) {
	b, _ := wire.Request{Op: wire.OpSocket}.AppendTo(nil)
	b[0] = wire.Version + 1
	if _, err := wire.ParseRequest(b); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("got %v", err)
	}
}

func FuzzParseRequest(f *testing.F) {
	b, _ := wire.Request{Op: wire.OpSocket, Seq: 1, PID: 2, ID: "a", Cgroup: "/b"}.AppendTo(nil)
	f.Add(b)
	f.Add([]byte{wire.Version})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := wire.ParseRequest(b)
		if err != nil {
			return
		}
		again, err := r.AppendTo(nil)
		if err == nil && len(again) != len(b) {
			t.Errorf("%d bytes became %d", len(b), len(again))
		}
	})
}
