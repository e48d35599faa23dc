//go:build integration

package bucketfs

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

// failPuts makes the object store respond to uploads with a status.
func (r *rig) failPuts(status int) {
	r.s3.Fail(func(req *http.Request) s3test.Fault {
		if req.Method == http.MethodPut {
			return s3test.Fault{Status: status}
		}
		return s3test.Fault{}
	})
}

func TestFailedUploadIsAnErrorOfCloseAndIsRetriedBySync(t *testing.T) {
	r := newRig(t)
	for status, want := range map[int]syscall.Errno{http.StatusForbidden: syscall.EACCES, http.StatusInternalServerError: syscall.EIO} {
		name := fmt.Sprint("file-", status)
		f, err := os.Create(r.path(name))
		testkit.NoError(t, "create", err)
		_, err = f.WriteString("content")
		testkit.NoError(t, "write", err)
		r.failPuts(status)
		r.wantErrno("sync", f.Sync(), want)
		r.wantNoObject(name)
		r.s3.Fail(nil)
		testkit.NoError(t, "sync", f.Sync())
		r.wantObject(name, "content")
		_, err = f.WriteString(", more")
		testkit.NoError(t, "write", err)
		r.failPuts(status)
		r.wantErrno("close", f.Close(), want)
		r.s3.Fail(nil)
	}
}

// The file retains its old name, and its content belongs to that name.
func TestFailedDeletionOfARenameLosesNothing(t *testing.T) {
	r := newRig(t)
	r.put("a", "old")
	f, err := os.OpenFile(r.path("a"), os.O_WRONLY|os.O_TRUNC, 0)
	testkit.NoError(t, "open", err)
	_, err = f.WriteString("new")
	testkit.NoError(t, "write", err)
	r.s3.Fail(func(req *http.Request) s3test.Fault {
		if req.Method == http.MethodDelete {
			return s3test.Fault{Status: http.StatusForbidden}
		}
		return s3test.Fault{}
	})
	r.wantErrno("rename", os.Rename(r.path("a"), r.path("b")), syscall.EACCES)
	r.s3.Fail(nil)
	testkit.NoError(t, "close", f.Close())
	r.wantObject("a", "new")
	r.wantObject("b", "new")
}

func TestBriefFailuresAreRetried(t *testing.T) {
	r := newRig(t)
	var n atomic.Int64
	r.s3.Fail(func(*http.Request) s3test.Fault {
		switch n.Add(1) % 4 {
		case 1:
			return s3test.Fault{Status: http.StatusServiceUnavailable}
		case 3:
			return s3test.Fault{CutResponse: 1}
		}
		return s3test.Fault{}
	})
	content := random(3 << 20)
	r.write("file", content)
	r.wantFile("file", content)
	r.s3.Fail(nil)
	r.wantObject("file", content)
}

func TestBlockedReadsDelayNoOtherRequest(t *testing.T) {
	r := newRig(t)
	r.put("dir/file", "content")
	arrived, resume := r.pauseIf(func(req *http.Request) bool { return req.Method == http.MethodGet && !req.URL.Query().Has("list-type") })
	var readers sync.WaitGroup
	for i := range maxRequests {
		name := fmt.Sprint("large-", i)
		r.put(name, "content")
		readers.Go(func() {
			content, err := os.ReadFile(r.path(name))
			if err != nil || string(content) != "content" {
				t.Errorf("%s: %q, %v", name, content, err)
			}
		})
		testkit.Receive(t, "a read", arrived)
	}
	others := make(chan error, 1)
	go func() {
		_, statErr := os.Stat(r.path("dir/file"))
		_, listErr := os.ReadDir(r.dir)
		others <- errors.Join(statErr, listErr, os.Mkdir(r.path("new"), 0o755), os.Remove(r.path("dir/file")))
	}()
	testkit.NoError(t, "other requests", testkit.Receive(t, "the end of the other requests", others))
	resume()
	readers.Wait()
}

func TestUnreachableObjectStoreIsAnInputOutputError(t *testing.T) {
	r := newRig(t)
	r.put("file", "content")
	r.s3.Stop()
	_, err := os.ReadFile(r.path("file"))
	r.wantErrno("read", err, syscall.EIO)
	_, err = os.ReadDir(r.dir)
	r.wantErrno("list", err, syscall.EIO)
	r.s3.Restart()
	r.wantFile("file", "content")
}

func TestReplacedObjectIsStaleForItsReader(t *testing.T) {
	r := newRig(t)
	r.put("file", random(5<<20))
	f, err := os.Open(r.path("file"))
	testkit.NoError(t, "open", err)
	defer f.Close()
	b := make([]byte, 1000)
	_, err = f.ReadAt(b, 0)
	testkit.NoError(t, "read", err)
	r.put("file", strings.Repeat("x", 5<<20))
	_, err = f.ReadAt(b, 4<<20)
	r.wantErrno("read", err, syscall.ESTALE)
}

func TestScratchIsLimited(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Share = NewResources(t.TempDir(), 2<<20).NewShare() })
	r.wantErrno("write", os.WriteFile(r.path("large"), make([]byte, 2<<20), 0o644), syscall.ENOSPC)
	r.write("small", strings.Repeat("x", 1<<20))
	r.wantObject("small", strings.Repeat("x", 1<<20))
}

func TestReadOnlyMountChangesNothing(t *testing.T) {
	r := newRig(t, func(o *Options) { o.ReadOnly = true })
	r.put("dir/file", "content")
	r.wantFile("dir/file", "content")
	_, err := os.Create(r.path("new"))
	for call, err := range map[string]error{
		"create": err, "write": os.WriteFile(r.path("dir/file"), nil, 0o644), "mkdir": os.Mkdir(r.path("d"), 0o755),
		"remove": os.Remove(r.path("dir/file")), "rename": os.Rename(r.path("dir/file"), r.path("f")), "chmod": os.Chmod(r.path("dir/file"), 0o600),
		"truncate": os.Truncate(r.path("dir/file"), 1),
	} {
		r.wantErrno(call, err, syscall.EROFS)
	}
	r.wantObject("dir/file", "content")
}

func TestCheckDistinguishesFailures(t *testing.T) {
	r := newRig(t)
	testkit.NoError(t, "check", Check(testkit.Context(t), r.options))
	for want, change := range map[string]func(*Options){
		"denied":      func(o *Options) { o.Bucket.SecretKey = "wrong" },
		"no_bucket":   func(o *Options) { o.Bucket.Bucket = "other" },
		"unreachable": func(o *Options) { o.Bucket.Endpoint = "http://127.0.0.1:1" },
	} {
		o := r.options
		change(&o)
		err := Check(testkit.Context(t), o)
		if code := codeOf(err); code != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
