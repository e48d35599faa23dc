package server

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

// The folder of a session is removed before its end is recorded: a command that comes between
// the two finds neither.
func TestCommandOfASessionThatJustEndedIsRefusedAsLost(t *testing.T) {
	s, err := New(Config{RunDir: t.TempDir(), LogDir: t.TempDir(), Env: os.Environ(), AnyPeer: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.ports.close()
	defer s.Close()
	defer s.sessions.closeAll()
	const id = "s"
	if _, err := s.sessions.open(id, func() (*session, error) { return s.startSession(guest.SessionSpec{ID: id}) }); err != nil {
		t.Fatal(err)
	}
	ss, err := s.sessions.find(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := ss.acquire(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	defer ss.release()
	ss.stop(0)
	_, _, err = ss.begin("true\n", guest.ExecRequest{}, 0)
	if refused, ok := errors.AsType[*guest.Error](err); !ok || refused.Code != guest.CodeSessionLost {
		t.Errorf("got %v", err)
	}
}

func TestCommandOfASessionThatCannotBeWrittenLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	ss := &session{folder: dir, tree: &tree{root: &child{reaper: &reaper{}}}}
	if err := os.Mkdir(filepath.Join(dir, fileStderr), 0o700); err != nil { // the last of its files
		t.Fatal(err)
	}
	_, _, err := ss.begin("true\n", guest.ExecRequest{}, 0)
	if codeOf(err) != guest.CodeExists {
		t.Errorf("got %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
