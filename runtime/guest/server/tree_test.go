package server

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// TestMemberWhoseParentsEndedIsKilled: a process without our mark, in a session of
// its own, is a member by its parents alone. It must not get away because they
// are killed first.
func TestMemberWhoseParentsEndedIsKilled(t *testing.T) {
	r := newReaper(false, func() {})
	defer r.close()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	up, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	root, err := r.start(sh, []string{"sh", "-c", "setsid env -i sh -c 'sleep 1000 & echo up; wait' & sleep 1000"},
		&syscall.ProcAttr{Dir: dir, Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true}, Files: []uintptr{0, theirs.Fd(), 2}})
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	tr := &tree{root: root, mark: []byte("NOBODY=has-this")}
	escaped := func() (n int) {
		for _, p := range tr.living() {
			if p.session != root.pid {
				n++
			}
		}
		return n
	}
	if _, err := up.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if n := escaped(); n != 2 {
		t.Errorf("the escaped shell and its child are %d members", n)
	}
	root.signal(syscall.SIGKILL, true)
	<-root.done
	if n := escaped(); n != 2 {
		t.Errorf("after their parents have ended, %d of 2 are members", n)
	}
	tr.kill()
	if n := AliveIn(dir); n > 0 {
		t.Errorf("%d processes are left", n)
	}
}

func TestParseStat(t *testing.T) {
	const fields = " 5 6 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 "
	for _, tt := range []struct {
		name, stat string
		want       proc
		ok         bool
	}{
		{"plain", "9 (sh) S" + fields + "1 0 1234 0", proc{identity{9, 1234}, 5, 7, false, false}, true},
		{"a name that pretends", "9 (a) Z 1 1 1 (b) S" + fields + "1 0 1234 0", proc{identity{9, 1234}, 5, 7, false, false}, true},
		{"a name with a newline", "9 (a\nb) R" + fields + "3 0 1234 0", proc{identity{9, 1234}, 5, 7, false, false}, true},
		{"zombie", "9 (sh) Z" + fields + "1 0 1234 0", proc{identity{9, 1234}, 5, 7, true, false}, true},
		{"only its first thread is a zombie", "9 (sh) Z" + fields + "2 0 1234 0", proc{identity{9, 1234}, 5, 7, false, false}, true},
		{"stopped", "9 (sh) T" + fields + "1 0 1234 0", proc{identity{9, 1234}, 5, 7, false, true}, true},
		{"cut", "9 (sh) S 5 6", proc{}, false},
		{"empty", "", proc{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, ok := parseStat(9, []byte(tt.stat)); got != tt.want || ok != tt.ok {
				t.Errorf("got %+v, %v", got, ok)
			}
		})
	}
}

func TestHasVariable(t *testing.T) {
	for environ, want := range map[string]bool{
		"": false, "M=1": true, "A=b\x00M=1\x00": true, "M=1\x00A=b": true,
		"M=12\x00": false, "XM=1\x00": false, "A=M=1": false, "XM=1\x00M=1\x00": true,
	} {
		if got := hasVariable([]byte(environ), []byte("M=1")); got != want {
			t.Errorf("%q: %v", environ, got)
		}
	}
}
