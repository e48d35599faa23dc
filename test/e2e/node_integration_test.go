//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// node is a node with a home and a port of its own.
type node struct{ *testnode.Node }

// common is the node of all tests that neither kill it nor count what it uses.
var common struct {
	once sync.Once
	node *node
	err  error
}

// startHome makes the test binary a process that starts a node with that home and then
// waits until it is killed.
const startHome = "DOZE_TEST_START_HOME"

func TestMain(m *testing.M) {
	if home := os.Getenv(startHome); home != "" {
		text, err := testnode.ProjectCaddyfile()
		if err != nil {
			panic(err)
		}
		n, err := testnode.New(testnode.Config{Home: home, Caddyfile: text})
		if err == nil {
			err = n.Start()
		}
		if err != nil {
			panic(err)
		}
		fmt.Println(n.PID())
		select {}
	}
	code := m.Run()
	if n := common.node; n != nil {
		if code != 0 {
			fmt.Fprintf(os.Stderr, "the log of the common node:\n%s", n.Log())
		}
		if err := n.Remove(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// commonNode returns the node that tests share.
func commonNode(t *testing.T) *node {
	t.Helper()
	common.once.Do(func() {
		n, err := testnode.New(testnode.Config{Caddyfile: caddyfile(t, "allow_images localhost/**")})
		if err == nil {
			common.node, err = &node{n}, n.Start()
		}
		common.err = err
	})
	if common.err != nil {
		t.Fatal(common.err)
	}
	return common.node
}

// ownNode starts a node for this test alone.
func ownNode(t *testing.T) *node {
	t.Helper()
	return &node{testnode.Start(t, testnode.Config{})}
}

// ownNodeIn is ownNode with that home.
func ownNodeIn(t *testing.T, home string) *node {
	t.Helper()
	return &node{testnode.Start(t, testnode.Config{Home: home})}
}

// caddyfile is the project's own with more options of doze.
func caddyfile(t *testing.T, options ...string) string {
	t.Helper()
	text, err := testnode.ProjectCaddyfile(options...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// browser returns a client for previews and for what the API's client does not
// do. proto is "h1" or "h2".
func (n *node) browser(t *testing.T, proto string) *http.Client {
	t.Helper()
	c := n.Client(proto)
	c.Timeout = testkit.Patience
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// do makes a call of the API that its client has no method for.
func (n *node) do(t *testing.T, method, path, contentType string, body io.Reader) (status int, text string) {
	t.Helper()
	status, text, err := n.Do(testkit.Context(t), method, path, contentType, body)
	if err != nil {
		t.Fatal(err)
	}
	return status, text
}

// admin reads from the node's admin socket.
func (n *node) admin(t *testing.T, path string) string {
	t.Helper()
	text, err := n.Admin(testkit.Context(t), path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// metric adds up the series of a metric whose text contains every part.
func (n *node) metric(t *testing.T, name string, parts ...string) float64 {
	t.Helper()
	sum := 0.0
series:
	for line := range strings.Lines(n.admin(t, "/metrics")) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if series != name && !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, part := range parts {
			if !strings.Contains(series, part) {
				continue series
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// podman runs a command of the node's user's Podman.
func (n *node) podman(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(testkit.Context(t), "podman", args...)
	cmd.Dir = n.Home
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("podman %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func TestNodeEndsWithTheTestThatStartedIt(t *testing.T) {
	home, err := os.MkdirTemp(os.Getenv("HOME"), "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), startHome+"="+home)
	parent.Stderr = t.Output()
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	_, err = fmt.Fscan(out, &pid)
	if kerr := parent.Process.Kill(); err != nil || kerr != nil {
		t.Fatal(err, kerr)
	}
	parent.Wait()
	ended := func() bool { // a zombie has no program
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		return errors.Is(err, os.ErrNotExist)
	}
	t.Cleanup(func() {
		if !ended() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	testkit.Eventually(t, "the node has ended", ended)
}
