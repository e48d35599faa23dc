package sandbox

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// letters describes programs: the state of each, in the order of their starts.
func letters(list []Session) string {
	var b []byte
	for _, s := range list {
		b = append(b, s.State[0])
	}
	return string(b)
}

func TestProgramsThatHaveEndedAreDroppedFirst(t *testing.T) {
	states := map[rune]guest.ProcessState{'r': guest.ProcessRunning, 'e': guest.ProcessExited, 'l': guest.ProcessLost}
	k := programs[Session]{most: 4, exited: 2}
	for _, tt := range []struct{ list, stored, dropped string }{
		{"", "", ""},
		{"rele", "rele", ""},
		{"eere", "ere", "e"},
		{"lrrrr", "rrrr", "l"},
		{"rlererr", "rrrr", "lee"},
		{"eeell", "eell", "e"},
		{"rrrrrr", "rrrr", "rr"},
	} {
		var list []Session
		for i, letter := range tt.list {
			list = append(list, Session{Session: guest.Session{ID: fmt.Sprint(i), State: states[letter], StartedAt: time.Unix(int64(i), 0)}})
		}
		slices.Reverse(list)
		stored, dropped := k.bound(list)
		if letters(stored) != tt.stored || letters(dropped) != tt.dropped {
			t.Errorf("of %q %q is stored and %q dropped, want %q and %q", tt.list, letters(stored), letters(dropped), tt.stored, tt.dropped)
		}
		if !slices.IsSortedFunc(stored, func(a, b Session) int { return a.StartedAt.Compare(b.StartedAt) }) {
			t.Errorf("%q is not in the order of the starts", tt.list)
		}
	}
}

func TestSpareInterpreterIsNotFound(t *testing.T) {
	list := []Context{{Spare: true, Process: "p-aaaaaaaa"}, {ID: "python", Process: "p-bbbbbbbb"}}
	if c, ok := find(list, "python"); !ok || c.Process != "p-bbbbbbbb" {
		t.Errorf("found %+v", c)
	}
	if c, ok := find(list, ""); ok {
		t.Errorf("found %+v", c)
	}
}
