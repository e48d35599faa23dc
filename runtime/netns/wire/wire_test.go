package wire

import (
	"strings"
	"testing"
)

func TestRequestsSurviveTheWire(t *testing.T) {
	for _, want := range []Request{
		{Op: OpSocket, Family: IPv6, Seq: 1, PID: 4242, ID: "k3f9x2m7q1az", Cgroup: "/doze/sandboxes/k3f9x2m7q1az"},
		{Op: OpForget, Seq: 1<<32 - 1, ID: "k3f9x2m7q1az"},
		{Op: OpTUN, Seq: 2, PID: 4242, ID: "k3f9x2m7q1az", Cgroup: "/doze/sandboxes/k3f9x2m7q1az"},
		{},
	} {
		b, err := want.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParseRequest(b)
		if err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	if _, err := (Request{ID: strings.Repeat("a", MaxPacket)}).AppendTo(nil); err == nil {
		t.Error("a request beyond MaxPacket was accepted")
	}
}

func TestResponsesSurviveTheWire(t *testing.T) {
	for _, want := range []Response{
		{Seq: 7},
		{Status: StatusFailed, Seq: 8, Errno: 111, Text: "connection refused"},
	} {
		got, err := ParseResponse(want.AppendTo(nil))
		if err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	long := Response{Text: strings.Repeat("a", 2*MaxPacket)}.AppendTo(nil)
	if len(long) != MaxPacket {
		t.Errorf("a long response has %d bytes", len(long))
	}
}

func TestAnotherVersionIsRefusedByName(t *testing.T) {
	b, _ := Request{Op: OpSocket}.AppendTo(nil)
	b[0] = Version + 1
	if _, err := ParseRequest(b); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("got %v", err)
	}
}

func FuzzParseRequest(f *testing.F) {
	b, _ := Request{Op: OpSocket, Seq: 1, PID: 2, ID: "a", Cgroup: "/b"}.AppendTo(nil)
	f.Add(b)
	f.Add([]byte{Version})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRequest(b)
		if err != nil {
			return
		}
		again, err := r.AppendTo(nil)
		if err == nil && len(again) != len(b) {
			t.Errorf("%d bytes became %d", len(b), len(again))
		}
	})
}
