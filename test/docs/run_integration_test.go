//go:build integration

package docs

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// limit of one session. It decides only how long a broken page keeps the test.
const limit = 3 * time.Minute

// secrets are in the environment of all blocks. An upstream prints no part of them.
var secrets = []string{"GITHUB_TOKEN=github-token-0123456789", "ANTHROPIC_API_KEY=anthropic-key-0123456789"}

func TestPages(t *testing.T) {
	for _, page := range pages(t) {
		if elsewhere[page] != nil {
			continue
		}
		blocks, err := parse(read(t, page))
		if err != nil {
			t.Fatalf("%s: %v", page, err)
		}
		if slices.ContainsFunc(blocks, func(b block) bool { return b.mark == "run" }) {
			t.Run(page, func(t *testing.T) { runPage(t, page, blocks) })
		}
	}
}

// runner runs the sessions of one page, in one folder.
type runner struct {
	page   string
	folder string
	env    []string
}

func runPage(t *testing.T, page string, blocks []block) {
	n := startNode(t, page, blocks)
	r := runner{page: page, folder: t.TempDir()}
	r.prepare(t, n, slices.ContainsFunc(blocks, func(b block) bool { return b.language == "ts" && b.mark == "run" }))
	var sessions []string
	for _, b := range blocks {
		if b.mark == "run" && !slices.Contains(sessions, b.session) {
			sessions = append(sessions, b.session)
		}
	}
	for _, session := range sessions {
		mine := slices.DeleteFunc(slices.Clone(blocks), func(b block) bool { return b.session != session })
		t.Run(session, func(t *testing.T) { r.run(t, mine) })
	}
}

// startNode starts the node of a page, whose upstreams respond for the hosts of the
// documents. The nodes of pages about backups and buckets have an object store.
func startNode(t *testing.T, page string, blocks []block) *testnode.Node {
	names := []string{
		"*.example.com", "*.mirror.example.com", "github.com", "*.github.com", "raw.githubusercontent.com", "api.anthropic.com", "api.openai.com",
	}
	upstream := testkit.NewUpstream(t, testkit.UpstreamOptions{TLS: true, HTTP2: true, Names: names})
	upstream.Handle(respond(t))
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, upstream.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	lines := []string{"egress {", "upstream_ca " + ca}
	for _, name := range names {
		lines = append(lines, fmt.Sprintf("resolve %s %s", name, upstream.Addr()))
	}
	for _, b := range blocks {
		if b.mark == "node" {
			lines = append(lines, inEgress(t, b))
		}
	}
	lines = append(lines, "}")
	if slices.Contains([]string{"README.md", "docs/backups.md"}, page) {
		s3 := s3test.Start(t)
		lines = append(lines, "backups {", "endpoint "+s3.URL, "bucket "+s3.Bucket, "access_key "+s3.AccessKey, "secret_key "+s3.SecretKey, "password only-for-this-test", "}")
	}
	if page == "docs/buckets.md" {
		s3 := s3test.Start(t)
		lines = append(lines, "bucket results {", "endpoint "+s3.URL, "bucket "+s3.Bucket, "access_key "+s3.AccessKey, "secret_key "+s3.SecretKey, "}")
	}
	text, err := testnode.ProjectCaddyfile(lines...)
	if err != nil {
		t.Fatal(err)
	}
	return testnode.Start(t, testnode.Config{Caddyfile: text})
}

// inEgress returns the options of egress in a block `caddyfile node`.
func inEgress(t *testing.T, b block) string {
	m := regexp.MustCompile(`(?s)^\{\n\tdoze \{\n\t\tegress \{\n(.*)\n\t\t\}\n\t\}\n\}\n$`).FindStringSubmatch(b.text)
	if m == nil {
		t.Fatalf("line %d: a block `caddyfile node` has the options of egress only, within { doze { egress { … } } }", b.line)
	}
	return m[1]
}

// respond responds with the host's name, as GitHub's API to its user, and below /team as a
// git server. Hosts that need a secret respond with 401 without it.
func respond(t *testing.T) http.HandlerFunc {
	_, github, _ := strings.Cut(secrets[0], "=")
	_, anthropic, _ := strings.Cut(secrets[1], "=")
	repository := serveRepository(t)
	return func(w http.ResponseWriter, r *http.Request) {
		_, password, _ := r.BasicAuth()
		switch {
		case r.Host == "api.github.com" && r.Header.Get("Authorization") != "Bearer "+github,
			(r.Host == "github.com" || r.Host == "code.example.com") && password != github,
			r.Host == "api.anthropic.com" && r.Header.Get("X-Api-Key") != anthropic:
			http.Error(w, "requires authentication", http.StatusUnauthorized)
		case strings.HasPrefix(r.URL.Path, "/team/"):
			repository.ServeHTTP(w, r)
		case r.Host == "api.github.com":
			fmt.Fprintln(w, `{"login":"octocat"}`)
		default:
			fmt.Fprintln(w, "this is "+r.Host)
		}
	}
}

// serveRepository serves the repository team/shop.git.
func serveRepository(t *testing.T) http.Handler {
	folder := t.TempDir()
	run := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), "git", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	work, bare := filepath.Join(folder, "work"), filepath.Join(folder, "team", "shop.git")
	run("init", "-q", "-b", "main", work)
	if err := os.WriteFile(filepath.Join(work, "README"), []byte("shop\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run("-C", work, "add", ".")
	run("-C", work, "-c", "user.name=Author", "-c", "user.email=author@example.com", "commit", "-qm", "first")
	run("clone", "-q", "--bare", work, bare)
	return &cgi.Handler{
		Path: filepath.Join(run("--exec-path"), "git-http-backend"),
		// Pushes need a user.
		Env: []string{"GIT_PROJECT_ROOT=" + folder, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent"},
	}
}

// prepare sets the environment, which is what `doze env` prints, and fills the folder with
// what programs in TypeScript need.
func (r *runner) prepare(t *testing.T, n *testnode.Node, typeScript bool) {
	command := n.Command()
	// All that a new policy needs is in its folder.
	r.env = append(command.Env, "GOPROXY=off", "GOFLAGS=")
	r.env = append(r.env, secrets...)
	r.env = append(r.env, "PATH="+filepath.Dir(command.Path)+":"+os.Getenv("PATH"), "NO_COLOR=1")
	out := r.output(t, "bash", "-c", `eval "$(doze env)"; env -0`)
	r.env = strings.Split(strings.TrimRight(out, "\x00"), "\x00")
	if !typeScript {
		return
	}
	if err := os.CopyFS(r.folder, os.DirFS("testdata/npm")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(testnode.Modules(t, "testdata/npm"), "node_modules"), filepath.Join(r.folder, "node_modules")); err != nil {
		t.Fatal(err)
	}
}

// output runs a program that has to succeed.
func (r *runner) output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := r.try(t, name, args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
	return out
}

func (r *runner) try(t *testing.T, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = r.folder, r.env
	cmd.WaitDelay = time.Second // for the output of processes in the background
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// separator is printed before the output of each block.
const separator = "\x1e"

// run runs the blocks of a session as one program, and compares what each prints.
func (r *runner) run(t *testing.T, blocks []block) {
	name, prelude, mark := "", "", ""
	switch blocks[0].language {
	case "sh":
		name, prelude, mark = "page.sh", "set -euo pipefail\n", `printf '\036'`
	case "python":
		name, mark = "page.py", `print(end="\x1e", flush=True)`
	case "ts":
		name, mark = "page.ts", `process.stdout.write("\x1e");`
	}
	var program strings.Builder
	program.WriteString(prelude)
	for _, b := range blocks {
		program.WriteString(mark + "\n" + b.text)
	}
	if err := os.WriteFile(filepath.Join(r.folder, name), []byte(program.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	var out string
	var err error
	switch blocks[0].language {
	case "sh":
		out, err = r.try(t, "bash", name)
	case "python":
		out, err = r.try(t, "/usr/bin/python3", "-u", name) // Debian's, which has its packages
	case "ts":
		r.output(t, "node_modules/.bin/tsc", "--project", ".")
		out, err = r.try(t, "node", "page.js")
	}
	outputs := strings.Split(out, separator)[1:]
	for i, got := range outputs {
		if b := blocks[i]; !b.prints(got) && (err == nil || i < len(outputs)-1) {
			t.Errorf("%s:%d prints\n%s\nand not, as the page shows,\n%s", r.page, b.line, got, b.output)
		}
	}
	if err != nil && len(outputs) == 0 {
		t.Fatalf("%s: %v\n%s", r.page, err, out)
	}
	if err != nil || len(outputs) != len(blocks) {
		last := len(outputs) - 1
		t.Errorf("%s:%d: %v\n%s\n%s", r.page, blocks[last].line, err, blocks[last].text, outputs[last])
	}
}

// Caddyfiles of the pages are valid and formatted.
func TestCaddyfiles(t *testing.T) {
	program := filepath.Join(os.Getenv("DOZE_BIN"), "doze-node")
	for _, page := range pages(t) {
		blocks, err := parse(read(t, page))
		if err != nil {
			t.Fatalf("%s: %v", page, err)
		}
		for _, b := range blocks {
			if b.mark != "adapt" && b.mark != "node" {
				continue
			}
			file := filepath.Join(t.TempDir(), "Caddyfile")
			if err := os.WriteFile(file, []byte(b.text), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{{"caddy", "adapt", "--adapter", "caddyfile", "--config", file}, {"caddy", "fmt", "--diff", file}} {
				if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
					t.Errorf("%s:%d: %v\n%s", page, b.line, err, out)
				}
			}
		}
	}
}
