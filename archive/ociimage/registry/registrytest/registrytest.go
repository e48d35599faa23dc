// Package registrytest runs a real container registry for a test, behind a proxy that counts uploads
// and injects faults.
package registrytest

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// program is the name of test/registry in $DOZE_BIN.
const program = "doze-registry"

// Server is a real registry on loopback, behind a proxy. Both end with the test.
type Server struct {
	Host           string // of the proxy, 127.0.0.1:PORT
	User, Password string

	t       testing.TB
	cmd     *exec.Cmd
	stdin   io.Closer     // open while the process may run
	exited  chan struct{} // closed when the process has ended
	target  *url.URL
	fault   atomic.Pointer[func(Upload) bool]
	blobs   atomic.Int64
	content atomic.Int64
}

// Start starts an empty registry with one user. It fails the test if $DOZE_BIN does not contain the program.
func Start(t testing.TB) *Server {
	t.Helper()
	bin := os.Getenv("DOZE_BIN")
	if bin == "" {
		t.Fatal("DOZE_BIN is not set: run this by `make test-integration PACKAGES=...`")
	}
	s := &Server{User: "pusher", Password: rand.Text(), t: t, exited: make(chan struct{})}
	s.cmd = exec.Command(filepath.Join(bin, program), "-folder", t.TempDir(), "-user", s.User, "-password", s.Password)
	// The pipe is closed when the test process dies, which ends the registry.
	var err error
	s.stdin, err = s.cmd.StdinPipe()
	testkit.NoError(t, "pipe", err)
	stdout, err := s.cmd.StdoutPipe()
	testkit.NoError(t, "pipe", err)
	var stderr bytes.Buffer
	s.cmd.Stderr = &stderr
	testkit.NoError(t, "start "+program, s.cmd.Start())
	t.Cleanup(s.Kill)
	address := make(chan string, 1)
	go func() { // ends with the process
		defer close(s.exited)
		line, _ := bufio.NewReader(stdout).ReadString('\n')
		address <- strings.TrimSpace(line)
		_, _ = io.Copy(io.Discard, stdout)
		_ = s.cmd.Wait() // it was killed
	}()
	s.target, err = url.Parse(testkit.Receive(t, program+" reports its address", address))
	testkit.NoError(t, "parse address", err)
	if s.target.Host == "" {
		<-s.exited
		t.Fatalf("%s ended: %s\n%s", program, s.cmd.ProcessState, stderr.String())
	}
	s.serveProxy()
	return s
}

// Kill kills the registry's process with SIGKILL. The proxy then closes the connection of each request. Kill is
// idempotent.
func (s *Server) Kill() {
	_ = s.cmd.Process.Kill()
	<-s.exited
}

// AuthFile writes a file with the credentials that podman login would write, and returns its path.
// The password is the user's unless another is given.
func (s *Server) AuthFile(t testing.TB, password string) string {
	t.Helper()
	login := base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "%s:%s", s.User, password))
	text, err := json.Marshal(map[string]any{"auths": map[string]any{s.Host: map[string]string{"auth": login}}})
	testkit.NoError(t, "encode", err)
	file := filepath.Join(t.TempDir(), "auth.json")
	testkit.NoError(t, "write", os.WriteFile(file, text, 0o600))
	return file
}

// Uploaded returns how many blobs the registry has received since the last call, and how many bytes of
// them the proxy has received.
func (s *Server) Uploaded() (blobs, content int64) { return s.blobs.Swap(0), s.content.Swap(0) }
