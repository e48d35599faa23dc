package git_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/runtime/git"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// sandbox is a guest in this process, with a home and a working directory of its own.
type sandbox struct {
	t      testing.TB
	client *guest.Client
	dir    string // the working directory
	bin    string // first in PATH
}

// newSandbox starts a guest. Programs are searched in its bin, and then in path, by default
// the test's own.
func newSandbox(t testing.TB, path ...string) *sandbox {
	t.Helper()
	s := &sandbox{t: t, dir: t.TempDir(), bin: t.TempDir()}
	if path == nil {
		path = []string{os.Getenv("PATH")}
	}
	srv, err := server.New(server.Config{
		RunDir: t.TempDir(), LogDir: t.TempDir(), Workdir: s.dir, AnyPeer: true, Grace: time.Millisecond, Version: "test",
		Env: []string{"PATH=" + s.bin + ":" + path[0], "HOME=" + t.TempDir(), "GIT_CONFIG_NOSYSTEM=1", "LANG=C"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx) }()
	s.client = guest.NewClient(srv.Socket())
	t.Cleanup(func() {
		s.client.Close()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return s
}

func (s *sandbox) git() *git.Git { return git.New(s.client, testkit.Patience) }

func (s *sandbox) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// program puts a shell script in the place of git.
func (s *sandbox) program(script string) {
	s.t.Helper()
	write(s.t, filepath.Join(s.bin, "git"), "#!/bin/sh\n"+script)
}

// entries are the names in a directory; nil if it does not exist.
func (s *sandbox) entries(path string) []string {
	s.t.Helper()
	list, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		s.t.Fatal(err)
	}
	names := []string{}
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

// run runs git as the author of the test's repositories.
func run(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@example.com", "GIT_ALLOW_PROTOCOL=file")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// origin is a repository with three commits on main, a branch, tags and a submodule.
type origin struct {
	dir                        string
	first, second, third, side string // commits
	unreferenced               string // that no branch or tag leads to
}

func newOrigin(t testing.TB) *origin {
	t.Helper()
	folder := t.TempDir()
	library := filepath.Join(folder, "library")
	run(t, folder, "init", "-q", "-b", "main", library)
	write(t, filepath.Join(library, "lib.txt"), "library\n")
	run(t, library, "add", ".")
	run(t, library, "commit", "-qm", "library")
	run(t, library, "commit", "-q", "--allow-empty", "-m", "a second commit")

	o := &origin{dir: filepath.Join(folder, "shop")}
	commit := func(content string) string {
		write(t, filepath.Join(o.dir, "README"), content+"\n")
		run(t, o.dir, "add", ".")
		run(t, o.dir, "commit", "-qm", content)
		return run(t, o.dir, "rev-parse", "HEAD")
	}
	run(t, folder, "init", "-q", "-b", "main", o.dir)
	o.first = commit("first")
	run(t, o.dir, "tag", "v1")
	o.second = commit("second")
	run(t, o.dir, "tag", "-a", "-m", "release", "both")
	o.third = commit("third")
	run(t, o.dir, "checkout", "-q", "-b", "side", o.first)
	o.side = commit("side")
	run(t, o.dir, "branch", "both")
	run(t, o.dir, "checkout", "-q", "--detach")
	o.unreferenced = commit("unreferenced")
	run(t, o.dir, "checkout", "-q", "-b", "with-submodule", o.first)
	run(t, o.dir, "submodule", "--quiet", "add", "../library", "lib")
	commit("submodule")
	run(t, o.dir, "checkout", "-q", "main")
	return o
}

// serve serves the repositories next to the origin over HTTP. The handler may be nil.
func (o *origin) serve(t testing.TB, before func(w http.ResponseWriter, r *http.Request) (done bool)) string {
	t.Helper()
	backend := &cgi.Handler{
		Path: filepath.Join(run(t, "", "--exec-path"), "git-http-backend"), Root: "/git",
		Env: []string{"GIT_PROJECT_ROOT=" + filepath.Dir(o.dir), "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if before != nil && before(w, r) {
			return
		}
		// Protocol version 2, by a variable that the handler does not pass on.
		h := *backend
		h.Env = append(slices.Clone(h.Env), "GIT_PROTOCOL="+r.Header.Get("Git-Protocol"))
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL + "/git/shop/.git"
}

// reasonOf is the reason of a failure; it ends the test for other errors.
func reasonOf(t testing.TB, err error) git.Reason {
	t.Helper()
	failed, ok := errors.AsType[*git.Error](err)
	if !ok {
		t.Fatalf("got %v (%T), want a *git.Error", err, err)
	}
	return failed.Reason
}

func TestClone(t *testing.T) {
	o := newOrigin(t)
	url := o.serve(t, nil)
	for _, tc := range []struct {
		name    string
		options git.CloneOptions
		want    git.Head
		commits string // in the history
		file    string // README's content
	}{
		{"default branch", git.CloneOptions{}, git.Head{Branch: "main", Commit: o.third}, "3", "third\n"},
		{"branch", git.CloneOptions{Branch: "side"}, git.Head{Branch: "side", Commit: o.side}, "2", "side\n"},
		{"tag", git.CloneOptions{Tag: "v1"}, git.Head{Commit: o.first}, "1", "first\n"},
		{"tag with a branch of its name", git.CloneOptions{Tag: "both"}, git.Head{Commit: o.second}, "2", "second\n"},
		{"branch with a tag of its name", git.CloneOptions{Branch: "both"}, git.Head{Branch: "both", Commit: o.side}, "2", "side\n"},
		{"commit", git.CloneOptions{Commit: o.second}, git.Head{Commit: o.second}, "2", "second\n"},
		{"commit without a ref", git.CloneOptions{Commit: o.unreferenced}, git.Head{Commit: o.unreferenced}, "3", "unreferenced\n"},
		{"shallow", git.CloneOptions{Depth: 1}, git.Head{Branch: "main", Commit: o.third}, "1", "third\n"},
		{"shallow branch", git.CloneOptions{Branch: "side", Depth: 1}, git.Head{Branch: "side", Commit: o.side}, "1", "side\n"},
		{"shallow tag", git.CloneOptions{Tag: "both", Depth: 1}, git.Head{Commit: o.second}, "1", "second\n"},
		{"shallow commit", git.CloneOptions{Commit: o.second, Depth: 1}, git.Head{Commit: o.second}, "1", "second\n"},
		{"shallow commit without a ref", git.CloneOptions{Commit: o.unreferenced, Depth: 2}, git.Head{Commit: o.unreferenced}, "2", "unreferenced\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSandbox(t)
			tc.options.URL = url
			tc.options.Dir = s.path("new", "shop")
			tc.want.Path = tc.options.Dir
			got, err := s.git().Clone(t.Context(), tc.options, nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			if n := run(t, got.Path, "rev-list", "--count", "HEAD"); n != tc.commits {
				t.Errorf("the history has %s commits, want %s", n, tc.commits)
			}
			if b, err := os.ReadFile(filepath.Join(got.Path, "README")); err != nil || string(b) != tc.file {
				t.Errorf("README has %q, %v", b, err)
			}
			if names := s.entries(s.path("new")); len(names) != 1 {
				t.Errorf("next to the clone are %q", names)
			}
		})
	}
}

func TestCloneIntoTheWorkingDirectoryByDefault(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	got, err := s.git().Clone(t.Context(), git.CloneOptions{URL: o.serve(t, nil)}, nil)
	if err != nil || got.Path != s.path("shop") {
		t.Fatalf("got %+v, %v", got, err)
	}
}

func TestCloneIntoAnEmptyDirectory(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	before, err := os.Stat(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.git().Clone(t.Context(), git.CloneOptions{URL: o.serve(t, nil), Dir: s.dir + "/"}, nil); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(s.dir); err != nil || !os.SameFile(before, after) {
		t.Errorf("the directory was replaced, %v", err)
	}
}

func TestCloneWithSubmodules(t *testing.T) {
	o := newOrigin(t)
	url := o.serve(t, nil)
	commit := run(t, o.dir, "rev-parse", "with-submodule")
	run(t, o.dir, "tag", "modules", commit)
	run(t, o.dir, "branch", "modules", o.side)
	for name, options := range map[string]git.CloneOptions{
		"branch":                                {Branch: "with-submodule"},
		"shallow branch":                        {Branch: "with-submodule", Depth: 1},
		"commit":                                {Commit: commit},
		"shallow commit":                        {Commit: commit, Depth: 1},
		"tag with a branch of its name":         {Tag: "modules"},
		"shallow tag with a branch of its name": {Tag: "modules", Depth: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSandbox(t)
			options.URL, options.Dir, options.Submodules = url, s.path("shop"), true
			// The address of the submodule is relative to the repository's, which ends with .git.
			redirect(t, o)
			var submodules []string
			if _, err := s.git().Clone(t.Context(), options, func(p git.Progress) { submodules = append(submodules, p.Submodule) }); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(s.path("shop", "lib", "lib.txt")); err != nil || string(b) != "library\n" {
				t.Errorf("the submodule has %q, %v", b, err)
			}
			if n := run(t, s.path("shop", "lib"), "rev-list", "--count", "HEAD"); n != fmt.Sprint(2-options.Depth) {
				t.Errorf("the history of the submodule has %s commits", n)
			}
			if run(t, s.path("shop"), "submodule", "status"); !slices.Contains(submodules, "lib") || submodules[0] != "" {
				t.Errorf("progress of %q", submodules)
			}
		})
	}
}

// redirect makes the library also reachable relative to shop/.git.
func redirect(t testing.TB, o *origin) {
	t.Helper()
	link := filepath.Join(o.dir, "library")
	if err := os.Symlink(filepath.Join(filepath.Dir(o.dir), "library"), link); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

// A repository cannot make git copy files of the sandbox.
func TestSubmodulesOfServersHaveNoLocalAddresses(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	run(t, o.dir, "checkout", "-q", "-b", "local")
	run(t, o.dir, "submodule", "--quiet", "add", filepath.Join(filepath.Dir(o.dir), "library"), "local")
	run(t, o.dir, "commit", "-qm", "local")
	_, err := s.git().Clone(t.Context(), git.CloneOptions{URL: o.serve(t, nil), Branch: "local", Submodules: true}, nil)
	if reasonOf(t, err); !strings.Contains(err.Error(), "'file' not allowed") {
		t.Errorf("got %v", err)
	}
	if names := s.entries(s.dir); len(names) != 0 {
		t.Errorf("a failed clone left %q", names)
	}
}

func TestCloneOfAFileAddress(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	got, err := s.git().Clone(t.Context(), git.CloneOptions{URL: "file://" + o.dir, Depth: 1}, nil)
	if err != nil || got.Commit != o.third {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestCloneOfAnEmptyRepository(t *testing.T) {
	s, dir := newSandbox(t), t.TempDir()
	run(t, dir, "init", "-q", "--bare", "-b", "trunk")
	got, err := s.git().Clone(t.Context(), git.CloneOptions{URL: "file://" + dir, Dir: s.path("empty")}, nil)
	if err != nil || got.Commit != "" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestCloneReportsProgress(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	seen := map[git.Phase]git.Progress{}
	_, err := s.git().Clone(t.Context(), git.CloneOptions{URL: o.serve(t, nil)}, func(p git.Progress) { seen[p.Phase] = p })
	if err != nil {
		t.Fatal(err)
	}
	if p := seen[git.PhaseReceiving]; p.Done == 0 || p.Done != p.Total {
		t.Errorf("the last progress of each phase is %+v", seen)
	}
}

func TestFailedClones(t *testing.T) {
	o := newOrigin(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	status := func(code int) string {
		return o.serve(t, func(w http.ResponseWriter, _ *http.Request) bool {
			if code == http.StatusUnauthorized {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			}
			http.Error(w, "remote says: No space left on device", code)
			return true
		})
	}
	var requests atomic.Int32
	cut := o.serve(t, func(http.ResponseWriter, *http.Request) bool {
		if requests.Add(1) > 1 {
			panic(http.ErrAbortHandler) // during the transfer
		}
		return false
	})
	plain := o.serve(t, nil)
	missing := strings.Repeat("0123456789", 4)
	for _, tc := range []struct {
		name    string
		options git.CloneOptions
		want    git.Reason
		says    string
	}{
		{"401", git.CloneOptions{URL: status(401)}, git.AuthenticationFailed, "could not read Username"},
		{"403", git.CloneOptions{URL: status(403)}, git.AuthenticationFailed, "403"},
		{"404", git.CloneOptions{URL: status(404)}, git.RepositoryNotFound, "not found"},
		{"500", git.CloneOptions{URL: status(500)}, git.NetworkFailed, "500"},
		{"cut off", git.CloneOptions{URL: cut}, git.NetworkFailed, ""},
		{"refused connection", git.CloneOptions{URL: fmt.Sprintf("http://%s/shop.git", closed.Addr())}, git.NetworkFailed, "onnect"},
		{"unknown branch", git.CloneOptions{URL: plain, Branch: "none"}, git.RefNotFound, "none"},
		{"tag as a branch", git.CloneOptions{URL: plain, Branch: "v1"}, git.RefNotFound, "v1 is a tag"},
		{"unknown tag", git.CloneOptions{URL: plain, Tag: "none"}, git.RefNotFound, "none"},
		{"branch as a tag", git.CloneOptions{URL: plain, Tag: "side"}, git.RefNotFound, "side"},
		{"unknown commit", git.CloneOptions{URL: plain, Commit: missing}, git.RefNotFound, missing},
		{"unknown commit, shallow", git.CloneOptions{URL: plain, Commit: missing, Depth: 1}, git.RefNotFound, missing},
		{"not a repository", git.CloneOptions{URL: "file:///etc"}, git.RepositoryNotFound, "/etc"},
	} {
		for _, exists := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, directory exists %v", tc.name, exists), func(t *testing.T) {
				s := newSandbox(t)
				requests.Store(0)
				tc.options.Dir = s.path("target")
				var want []string
				if exists {
					want = []string{}
					if err := os.Mkdir(tc.options.Dir, 0o755); err != nil {
						t.Fatal(err)
					}
				}
				_, err := s.git().Clone(t.Context(), tc.options, nil)
				if got := reasonOf(t, err); got != tc.want || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got reason %d, %v", got, err)
				}
				if strings.Contains(err.Error(), ".doze-clone-") {
					t.Errorf("the error has the path of the incomplete clone: %v", err)
				}
				if got := s.entries(tc.options.Dir); !slices.Equal(got, want) || got == nil != (want == nil) {
					t.Errorf("the directory has %q, want %q", got, want)
				}
				if names := s.entries(s.dir); len(names) > 1 || !exists && len(names) > 0 {
					t.Errorf("a failed clone left %q", names)
				}
			})
		}
	}
}

func TestCloneNeverTouchesExistingFiles(t *testing.T) {
	o := newOrigin(t)
	url := o.serve(t, nil)
	for name, prepare := range map[string]func(dir string) error{
		"file": func(dir string) error { return os.WriteFile(dir, []byte("mine"), 0o600) },
		"directory with a file": func(dir string) error {
			return errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, ".hidden"), []byte("mine"), 0o600))
		},
		"symbolic link": func(dir string) error { return os.Symlink("elsewhere", dir) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSandbox(t)
			dir := s.path("target")
			if err := prepare(dir); err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(dir)
			if err != nil {
				t.Fatal(err)
			}
			_, err = s.git().Clone(t.Context(), git.CloneOptions{URL: url, Dir: dir}, nil)
			if got := reasonOf(t, err); got != git.TargetExists || !strings.Contains(err.Error(), dir) {
				t.Errorf("got reason %d, %v", got, err)
			}
			if after, err := os.Lstat(dir); err != nil || !os.SameFile(before, after) || before.Size() != after.Size() {
				t.Errorf("the target has changed, %v", err)
			}
		})
	}
}

// Files that appear while git runs are not removed with the clone.
func TestCloneDoesNotReplaceADirectoryThatAppears(t *testing.T) {
	o := newOrigin(t)
	s := newSandbox(t)
	dir := s.path("target")
	url := o.serve(t, func(http.ResponseWriter, *http.Request) bool {
		write(t, filepath.Join(dir, "mine"), "mine")
		return false
	})
	_, err := s.git().Clone(t.Context(), git.CloneOptions{URL: url, Dir: dir}, nil)
	if got := reasonOf(t, err); got != git.TargetExists {
		t.Errorf("got reason %d, %v", got, err)
	}
	if got := s.entries(dir); !slices.Equal(got, []string{"mine"}) {
		t.Errorf("the directory has %q", got)
	}
	if names := s.entries(s.dir); len(names) != 1 {
		t.Errorf("left %q", names)
	}
}

// hang serves a repository whose transfer begins and does not end. It reports each.
func hang(t testing.TB, o *origin) (url string, transfers <-chan struct{}) {
	began := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(context.Background())
	url = o.serve(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return false
		}
		began <- struct{}{}
		select {
		case <-r.Context().Done():
		case <-ctx.Done():
		}
		return true
	})
	t.Cleanup(cancel) // before the server is closed
	return url, began
}

func TestInterruptedClonesLeaveNothing(t *testing.T) {
	o := newOrigin(t)
	for _, exists := range []bool{false, true} {
		t.Run(fmt.Sprintf("canceled, directory exists %v", exists), func(t *testing.T) {
			s := newSandbox(t)
			url, transfers := hang(t, o)
			if exists {
				if err := os.Mkdir(s.path("target"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				<-transfers
				cancel()
			}()
			_, err := s.git().Clone(ctx, git.CloneOptions{URL: url, Dir: s.path("target")}, nil)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			if names := s.entries(s.dir); exists != (len(names) == 1) || len(s.entries(s.path("target"))) > 0 {
				t.Errorf("an interrupted clone left %q", names)
			}
		})
	}
	t.Run("timed out", func(t *testing.T) {
		s := newSandbox(t)
		url, _ := hang(t, o)
		_, err := git.New(s.client, 500*time.Millisecond).Clone(t.Context(), git.CloneOptions{URL: url}, nil)
		if got := reasonOf(t, err); got != git.TimedOut {
			t.Errorf("got reason %d, %v", got, err)
		}
		if names := s.entries(s.dir); len(names) > 0 {
			t.Errorf("a clone that timed out left %q", names)
		}
	})
}

func TestCloneRemovesWhatEarlierClonesLeft(t *testing.T) {
	o, s := newOrigin(t), newSandbox(t)
	url, transfers := hang(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := s.git().Clone(ctx, git.CloneOptions{URL: url, Dir: s.path("running")}, nil)
		ended <- err
	}()
	testkit.Receive(t, "the transfer", transfers)
	running := s.entries(s.dir)
	write(t, s.path(".doze-clone-abcdefgh2345", "objects", "pack"), "of a clone that was cut off")
	write(t, s.path(".doze-clone-notes", "file"), "of another program")
	write(t, s.path(".doze-clone-abcdefgh6789"), "a file")
	if _, err := s.git().Clone(t.Context(), git.CloneOptions{URL: "file://" + o.dir, Dir: s.path("shop")}, nil); err != nil {
		t.Fatal(err)
	}
	want := append(running, ".doze-clone-notes", ".doze-clone-abcdefgh6789", "shop")
	slices.Sort(want)
	if diff := cmp.Diff(want, s.entries(s.dir)); diff != "" || len(running) != 1 {
		t.Errorf("running are %q: %s", running, diff)
	}
	cancel()
	if err := testkit.Receive(t, "the end", ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestMissingGit(t *testing.T) {
	s := newSandbox(t, t.TempDir())
	if _, err := s.git().Status(t.Context(), s.dir); reasonOf(t, err) != git.NotInstalled {
		t.Errorf("got %v", err)
	}
}
