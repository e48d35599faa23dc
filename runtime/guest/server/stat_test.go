package server

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// asOther runs f as a user who may read no file of this one.
func asOther(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // ends the thread with this goroutine, and its user with it
		const other = 65534
		unix.SetfsuidRetUid(other)
		f()
	}()
	<-done
}

func TestStatDescribesAFileThatTheGuestMayNotRead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "secret")
	if err := errors.Join(os.WriteFile(path, []byte("12345"), 0), os.Chmod(dir, 0o711), os.Chmod(filepath.Dir(dir), 0o711)); err != nil {
		t.Fatal(err)
	}
	s := &Server{cfg: Config{Root: "/", Workdir: "/"}}
	request := func(query string) (v any, err error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, guest.RouteStat+"?path="+path+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		asOther(func() { v, err = s.stat(r) })
		return v, err
	}
	v, err := request("")
	info, ok := v.(guest.FileInfo)
	if err != nil || !ok || info.Path != path || info.Size != 5 || info.Mode != "0000" || info.ETag != "" {
		t.Errorf("got %+v, %v", v, err)
	}
	if v, err := request("&digest=true"); codeOf(err) != guest.CodeNotPermitted {
		t.Errorf("with a digest: %+v, %v", v, err)
	}
}
