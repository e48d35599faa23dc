package server

import (
	"errors"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

// Polls for a port would go on until the guest ends.
func TestRefusedWaitDoesNotPollForItsPort(t *testing.T) {
	s, err := New(Config{RunDir: t.TempDir(), LogDir: t.TempDir(), AnyPeer: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.ports.close()
	defer s.Close()
	for _, w := range []guest.Wait{
		{Port: 80, Log: "("}, {Port: 80, Exit: true}, {HTTP: &guest.WaitHTTP{Port: 80, Path: "/", Status: "2xx"}, Log: "("},
	} {
		_, err := s.condition(t.Context(), &process{}, w)
		if refused, ok := errors.AsType[*guest.Error](err); !ok || !strings.Contains(refused.Message, "2 conditions") {
			t.Errorf("%+v: %v", w, err)
		}
		if s.ports.waits != 0 {
			t.Fatalf("%+v: %d requests wait for a port", w, s.ports.waits)
		}
	}
}
