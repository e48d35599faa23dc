// Package testnode runs a node for tests and measurements: the built programs, as
// a child of this process and its user, with a home, a port and a Caddyfile of
// its own.
package testnode

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/doze-run/doze/api/client"
)

// wait bounds the waits for a node to serve and to end. It decides only how long
// a broken node keeps its caller. The node itself gives Podman two minutes.
const wait = 3 * time.Minute

// Config of a node. Zero values mean the defaults.
type Config struct {
	// Bin is the folder of the programs. Default: $DOZE_BIN.
	Bin string
	// Home is the node's folder, which is made and is removed with the node.
	// Default: a new one in the user's home.
	Home string
	// Caddyfile is the text of the configuration. Default: ProjectCaddyfile().
	// The environment has DOZE_HOME and DOZE_HTTPS_PORT for it.
	Caddyfile string
	// Enter is the beginning of the commands that run the programs, such as packaging/host/enter with its
	// arguments. It replaces itself by the program. Default: none.
	Enter []string
}

// Node is one node. Start, Stop, Kill and Remove are called by one goroutine at a
// time; Home, Port and CA are set from the beginning, API and Token once it has
// served for the first time, and all of them outlive restarts.
type Node struct {
	Home  string // DOZE_HOME
	Port  int
	CA    string // file of the CA that signs the node's certificates
	API   *client.Client
	Token string

	cfg   Config
	log   *os.File // has no name: a full home does not shorten it
	run   *running // nil while the node does not run
	roots *x509.CertPool
	ca    string // in roots
}

// New makes the home of a node. It starts nothing; Remove removes what it made.
func New(cfg Config) (n *Node, err error) {
	if cfg.Bin == "" {
		cfg.Bin = os.Getenv("DOZE_BIN")
	}
	if cfg.Bin == "" {
		return nil, errors.New("DOZE_BIN is not set: run this by `make test-integration PACKAGES=./test/...`")
	}
	if cfg.Caddyfile == "" {
		if cfg.Caddyfile, err = ProjectCaddyfile(); err != nil {
			return nil, err
		}
	}
	n = &Node{cfg: cfg, Home: cfg.Home}
	if n.Port, err = FreePort(); err != nil {
		return nil, err
	}
	if n.log, err = unnamedFile(); err != nil {
		return nil, err
	}
	if n.Home == "" {
		userHome, err := os.UserHomeDir()
		if err != nil {
			return nil, err
		}
		if n.Home, err = os.MkdirTemp(userHome, "node"); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(n.Home, 0o700); err != nil {
		return nil, err
	}
	n.CA = filepath.Join(n.Home, "caddy", "pki", "authorities", "local", "root.crt")
	return n, n.Configure(cfg.Caddyfile)
}

// ProjectCaddyfile is the project's own, read from its root or a folder below test/, with
// more lines of the global option doze.
func ProjectCaddyfile(options ...string) (string, error) {
	text, err := os.ReadFile("Caddyfile")
	if errors.Is(err, os.ErrNotExist) {
		text, err = os.ReadFile(filepath.Join("..", "..", "Caddyfile"))
	}
	if err != nil {
		return "", err
	}
	before, after, ok := strings.Cut(string(text), "doze {\n")
	if !ok {
		return "", errors.New("the Caddyfile has no global option doze")
	}
	return before + "doze {\n" + strings.Join(options, "\n") + "\n" + after, nil
}

// Start starts a node for a test and returns it when it serves. When the test
// ends, the node is removed with its sandboxes; its log is shown if the test has
// failed.
func Start(t testing.TB, cfg Config) *Node {
	t.Helper()
	n, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the node's log:\n%s", n.Log())
		}
		if err := n.Remove(); err != nil {
			t.Error(err)
		}
	})
	if err := n.Start(); err != nil {
		t.Fatal(err)
	}
	return n
}

// Configure writes the text of the configuration, which the next start or reload
// reads.
func (n *Node) Configure(text string) error {
	return os.WriteFile(n.Caddyfile(), caddyfile.Format([]byte(text)), 0o600)
}

// Caddyfile is the file with the configuration.
func (n *Node) Caddyfile() string { return filepath.Join(n.Home, "Caddyfile") }

// Program is the path of one of the programs.
func (n *Node) Program(name string) string { return filepath.Join(n.cfg.Bin, name) }

// Command is one of doze's, with the environment of this node.
func (n *Node) Command(args ...string) *exec.Cmd {
	return n.command("doze", args...)
}

func (n *Node) command(program string, args ...string) *exec.Cmd {
	line := slices.Concat(n.cfg.Enter, []string{n.Program(program)}, args)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Dir = n.Home
	cmd.Env = append(os.Environ(), "DOZE_HOME="+n.Home, fmt.Sprintf("DOZE_HTTPS_PORT=%d", n.Port), "DOZE_BIND=127.0.0.1")
	return cmd
}

// RunCommand is what Start starts: the node's own program. `doze run` becomes that by an
// exec that any of its threads may make, and the kernel keeps a parent-death signal only
// where the first thread does.
func (n *Node) RunCommand() *exec.Cmd {
	return n.command("doze-node", "run", "--config", n.Caddyfile(), "--adapter", "caddyfile")
}

// URL is where the API is, with a path of it.
func (n *Node) URL(path string) string {
	return fmt.Sprintf("https://api.doze.localhost:%d/api/v1%s", n.Port, path)
}

// Client returns a client that trusts the node's CA and reaches the node by any
// name: for previews, and for what API does not say. proto is "h1" or "h2". It
// follows no redirect and has no time limit.
func (n *Node) Client(proto string) *http.Client {
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{RootCAs: n.roots},
		MaxIdleConnsPerHost: 1024,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, fmt.Sprint("127.0.0.1:", n.Port))
		},
		Protocols: new(http.Protocols),
	}
	transport.Protocols.SetHTTP1(proto == "h1")
	transport.Protocols.SetHTTP2(proto == "h2")
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Do makes a call of the API that API has no method for, and reads the response's
// first MiB.
func (n *Node) Do(ctx context.Context, method, path, contentType string, body io.Reader) (status int, text string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, n.URL(path), body)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+n.Token)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	c := n.Client("h1")
	defer c.CloseIdleConnections()
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(all), err
}

// responds creates the client once the node has written its token, and checks
// whether the node serves.
func (n *Node) responds() error {
	ca, err := os.ReadFile(n.CA)
	if err != nil {
		return err
	}
	if n.API == nil || n.ca != string(ca) { // a node without its old store has another CA
		if err := n.connect(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err = n.API.Node(ctx)
	return err
}

func (n *Node) connect() error {
	token, err := os.ReadFile(filepath.Join(n.Home, "token"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(n.CA)
	if err != nil {
		return err
	}
	n.roots = x509.NewCertPool()
	if !n.roots.AppendCertsFromPEM(ca) {
		return errors.New("the CA is not written yet")
	}
	n.ca = string(ca)
	if n.API != nil {
		n.API.Close()
	}
	n.Token = strings.TrimSpace(string(token))
	n.API, err = client.New(client.Config{URL: n.URL(""), Token: n.Token, CAFile: n.CA})
	return err
}

// Remove destroys the sandboxes and the snapshots, ends the node and removes its home.
func (n *Node) Remove() error {
	var errs []error
	if n.API != nil {
		if n.run == nil { // sandboxes of a killed node would be left over
			errs = append(errs, n.Start())
		}
		if n.run != nil {
			errs = append(errs, n.destroySandboxes(), n.deleteSnapshots())
		}
		n.API.Close()
	}
	return errors.Join(append(errs, n.Stop(), n.log.Close(), os.RemoveAll(n.Home))...)
}

func (n *Node) destroySandboxes() error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	sandboxes, err := n.API.List(ctx, client.Filter{})
	errs := []error{err}
	for _, sb := range sandboxes {
		if err := n.API.Delete(ctx, sb.ID); err != nil {
			errs = append(errs, fmt.Errorf("destroy %s: %w", sb.Name, err))
		}
	}
	info, err := n.API.Node(ctx)
	errs = append(errs, err)
	for _, q := range info.Quarantined {
		if err := n.API.DeleteQuarantined(ctx, q.ID); err != nil {
			errs = append(errs, fmt.Errorf("remove %s from quarantine: %w", q.ID, err))
		}
	}
	return errors.Join(errs...)
}

// removalPoll is how often deleteSnapshots reads the list of containers.
const removalPoll = 300 * time.Millisecond

// deleteSnapshots deletes the snapshots, and returns when they have left Podman's storage, where
// they would outlive the node. It fails if none leaves it for a time.
func (n *Node) deleteSnapshots() error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	snapshots, err := n.API.Snapshots(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		if err := n.API.DeleteSnapshot(ctx, s.ID); err != nil {
			return fmt.Errorf("delete snapshot %s: %w", s.ID, err)
		}
	}
	info, err := n.API.Node(ctx)
	if err != nil {
		return err
	}
	podman := exec.CommandContext(ctx, "podman", "info", "--format", "{{.Store.GraphRoot}}")
	podman.Dir = n.Home
	root, err := podman.Output()
	if err != nil {
		return fmt.Errorf("find Podman's storage: %w", err)
	}
	list := filepath.Join(strings.TrimSpace(string(root)), "overlay-containers", "containers.json")
	stalled := time.NewTimer(wait)
	defer stalled.Stop()
	for left := 0; ; {
		// Snapshots have containers of the storage alone. `podman ps --external` fails if one of them, or
		// its image, is removed in the meantime; the storage replaces this file by a rename.
		containers, err := os.ReadFile(list)
		if err != nil {
			return fmt.Errorf("list the containers of snapshots: %w", err)
		}
		n := bytes.Count(containers, []byte("doze-snapshot-"+info.ID+"-"))
		if n == 0 {
			return nil
		}
		if n != left {
			left = n
			stalled.Reset(wait)
		}
		select {
		case <-time.After(removalPoll):
		case <-stalled.C:
			return fmt.Errorf("snapshots of node %s are left, and none was removed in %s", info.ID, wait)
		}
	}
}

// Admin returns the response to a GET from the node's admin socket. Another status than 200 is
// an error.
func (n *Node) Admin(ctx context.Context, path string) (string, error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(n.Home, "admin.sock"))
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s from the admin socket: %s", path, resp.Status)
	}
	return string(text), err
}

// FreePort returns a port of the loopback on which nothing listens.
func FreePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
