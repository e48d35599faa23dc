// Package s3test runs a real S3 server for a test, behind a proxy that injects faults.
package s3test

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// program is the name of test/s3server in $DOZE_BIN.
const program = "doze-s3server"

// internalFolder is where the server stores incomplete uploads of a bucket.
const internalFolder = ".sgwtmp"

// Server is a real S3 server with one bucket, behind a proxy that can inject faults. The server and
// the proxy end with the test. Stop and Restart must not be called concurrently.
type Server struct {
	URL                  string // of the proxy, http://127.0.0.1:PORT
	Bucket               string
	AccessKey, SecretKey string
	Folder               string // the object KEY is the file Folder/Bucket/KEY

	t       testing.TB
	program string
	process *process // nil if it is stopped

	target   atomic.Pointer[url.URL] // of the process; nil if it is stopped
	faults   atomic.Pointer[func(*http.Request) Fault]
	requests atomic.Int64
	uploaded atomic.Int64
}

// Start starts a server with an empty bucket. It fails the test if $DOZE_BIN does not contain the program.
func Start(t testing.TB) *Server {
	t.Helper()
	bin := os.Getenv("DOZE_BIN")
	if bin == "" {
		t.Fatal("DOZE_BIN is not set: run this by `make test-integration PACKAGES=...`")
	}
	s := &Server{
		Bucket:    "backups",
		AccessKey: "s3test",
		SecretKey: rand.Text(),
		Folder:    t.TempDir(),
		t:         t,
		program:   filepath.Join(bin, program),
	}
	testkit.NoError(t, "create bucket", os.Mkdir(filepath.Join(s.Folder, s.Bucket), 0o755))
	t.Cleanup(s.Stop)
	s.Restart()
	s.serveProxy()
	return s
}

// process is a running S3 server.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser // open while the process may run
	stderr bytes.Buffer
	exited chan struct{} // closed when the process has ended and its output has been read
}

// Stop kills the S3 server's process with SIGKILL. Until Restart, the proxy closes the
// connection of each request. Stop does nothing if the process is stopped.
func (s *Server) Stop() {
	if s.process == nil {
		return
	}
	s.target.Store(nil)
	_ = s.process.cmd.Process.Kill()
	<-s.process.exited
	s.process = nil
}

// Restart stops the S3 server's process if it is running, and starts a new one on the same
// folder. It returns when the new process accepts requests.
func (s *Server) Restart() {
	s.t.Helper()
	s.Stop()
	cmd := exec.Command(s.program, "-folder", s.Folder, "-access", s.AccessKey, "-secret", s.SecretKey)
	// The pipe is closed when the test process dies, which ends the server.
	stdin, err := cmd.StdinPipe()
	testkit.NoError(s.t, "pipe", err)
	p := &process{cmd: cmd, stdin: stdin, exited: make(chan struct{})}
	stdout, err := cmd.StdoutPipe()
	testkit.NoError(s.t, "pipe", err)
	cmd.Stderr = &p.stderr
	testkit.NoError(s.t, "start "+program, cmd.Start())
	s.process = p
	address := make(chan string, 1)
	go func() { // ends with the process
		defer close(p.exited)
		line, _ := bufio.NewReader(stdout).ReadString('\n')
		address <- strings.TrimSpace(line)
		_, _ = io.Copy(io.Discard, stdout)
		_ = cmd.Wait() // it was killed
	}()
	target, err := url.Parse(testkit.Receive(s.t, program+" reports its address", address))
	testkit.NoError(s.t, "parse address", err)
	if target.Host == "" {
		<-p.exited
		s.t.Fatalf("%s ended: %s\n%s", program, cmd.ProcessState, p.stderr.String())
	}
	s.target.Store(target)
}

// Requests returns how many requests the proxy has received, including requests that failed.
func (s *Server) Requests() int64 { return s.requests.Load() }

// Uploaded returns how many bytes of request bodies the proxy has received.
func (s *Server) Uploaded() int64 { return s.uploaded.Load() }

// ResetCounts sets Requests and Uploaded to 0.
func (s *Server) ResetCounts() {
	s.requests.Store(0)
	s.uploaded.Store(0)
}

// Objects returns the keys of the bucket, sorted.
func (s *Server) Objects(t testing.TB) []string {
	t.Helper()
	bucket := filepath.Join(s.Folder, s.Bucket)
	keys := []string{}
	err := filepath.WalkDir(bucket, func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != bucket:
			return nil // deleted since its folder was read
		case err != nil:
			return err
		case path == filepath.Join(bucket, internalFolder):
			return filepath.SkipDir
		case e.IsDir():
			return nil
		}
		key, err := filepath.Rel(bucket, path)
		keys = append(keys, filepath.ToSlash(key))
		return err
	})
	testkit.NoError(t, "list objects", err)
	slices.Sort(keys)
	return keys
}

// corrupted is the maximum number of bytes that Corrupt flips.
const corrupted = 16

// Corrupt flips bytes in the middle of an object's file, as a bad disk does. The server does
// not detect the change: it serves the flipped bytes with the object's old ETag.
func (s *Server) Corrupt(t testing.TB, key string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(s.Folder, s.Bucket, filepath.FromSlash(key)), os.O_RDWR, 0)
	testkit.NoError(t, "open object", err)
	defer f.Close()
	info, err := f.Stat()
	testkit.NoError(t, "stat object", err)
	b := make([]byte, min(info.Size(), corrupted))
	if len(b) == 0 {
		t.Fatalf("the object %s is empty", key)
	}
	offset := (info.Size() - int64(len(b))) / 2
	_, err = f.ReadAt(b, offset)
	testkit.NoError(t, "read object", err)
	for i := range b {
		b[i] = ^b[i]
	}
	_, err = f.WriteAt(b, offset)
	testkit.NoError(t, "write object", err)
}
