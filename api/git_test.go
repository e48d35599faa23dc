package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/git"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// gitIn runs git on this machine.
func gitIn(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=A", "-c", "user.email=a@example.com"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// newRepository makes a bare repository with one commit on main.
func newRepository(t *testing.T) (dir, commit string) {
	t.Helper()
	work := filepath.Join(t.TempDir(), "work")
	dir = filepath.Join(filepath.Dir(work), "shop.git")
	gitIn(t, "", "init", "-q", "-b", "main", work)
	if err := os.WriteFile(filepath.Join(work, "app.js"), []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	gitIn(t, work, "add", ".")
	gitIn(t, work, "commit", "-qm", "first")
	gitIn(t, "", "clone", "-q", "--bare", work, dir)
	return dir, gitIn(t, work, "rev-parse", "HEAD")
}

// serveRepository serves a repository over HTTP unless before responds.
func serveRepository(t *testing.T, dir string, before func(http.ResponseWriter, *http.Request) bool) string {
	t.Helper()
	backend := &cgi.Handler{
		Path: filepath.Join(gitIn(t, "", "--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + filepath.Dir(dir), "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=a"},
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if before == nil || !before(w, r) {
			backend.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL + "/shop.git"
}

func TestGitClone(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id) // the clone wakes it
	dir, commit := newRepository(t)
	address := serveRepository(t, dir, nil)
	target := filepath.Join(t.TempDir(), "shop")
	want := types.GitHead{Path: target, Branch: "main", Commit: commit}
	got := must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/clone", map[string]any{"url": address, "target_dir": target, "depth": 1})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	p := s.refused(problem.PathExists, "POST", "/sandbox/box/git/clone", map[string]any{"url": address, "target_dir": target})
	if !strings.Contains(p.Detail, target) {
		t.Errorf("the detail is %q", p.Detail)
	}
	s.sleep(id) // no lease is held
}

func TestGitCloneStreamsProgress(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir, commit := newRepository(t)
	target := filepath.Join(t.TempDir(), "shop")
	stream := s.open("POST", "/sandbox/box/git/clone", map[string]any{"url": serveRepository(t, dir, nil), "target_dir": target, "stream": true})
	received := false
	for {
		ev, ok := stream.next()
		if !ok {
			t.Fatal("the stream ended without complete")
		}
		if ev.name == "complete" {
			if diff := cmp.Diff(types.GitHead{Path: target, Branch: "main", Commit: commit}, parse[types.GitHead](t, ev)); diff != "" {
				t.Error(diff)
			}
			break
		}
		progress := parse[types.GitProgress](t, ev)
		received = received || progress.Phase == types.GitPhaseReceiving && progress.Done == progress.Total && progress.Total == 3
	}
	if !received {
		t.Error("no event has all received objects")
	}
	stream.expectEnd()
	stream = s.open("POST", "/sandbox/box/git/clone", map[string]any{"url": serveRepository(t, dir, nil), "target_dir": target, "stream": true})
	if p := parse[problem.Problem](t, stream.expect("problem")); p.Code != problem.PathExists {
		t.Errorf("got %+v", p)
	}
	stream.expectEnd()
}

// When the client disconnects, git is killed and the incomplete clone is deleted.
func TestAbandonedCloneLeavesNothing(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", streamed), func(t *testing.T) {
			s := newServer(t, Limits{})
			id := s.create("box")
			dir, _ := newRepository(t)
			hanging := make(chan struct{}, 1)
			address := serveRepository(t, dir, func(_ http.ResponseWriter, r *http.Request) bool {
				if r.Method != http.MethodPost {
					return false
				}
				io.Copy(io.Discard, r.Body) // otherwise the server does not notice that git is gone
				hanging <- struct{}{}
				<-r.Context().Done()
				return true
			})
			folder := t.TempDir()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan struct{})
			req := s.request(ctx, "POST", "/sandbox/box/git/clone", map[string]any{"url": address, "target_dir": filepath.Join(folder, "shop"), "stream": streamed})
			go func() {
				defer close(ended)
				if resp, err := s.http.Client().Do(req); err == nil {
					<-ctx.Done()
					resp.Body.Close()
				}
			}()
			testkit.Receive(t, "the server has the request", hanging)
			cancel()
			<-ended
			s.eventually("the directory is empty", func() bool {
				entries, err := os.ReadDir(folder)
				return err == nil && len(entries) == 0
			})
			s.sleep(id) // no lease is held
		})
	}
}

func TestFailedClonesHaveCodes(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir, _ := newRepository(t)
	status := func(code int) string {
		return serveRepository(t, dir, func(w http.ResponseWriter, _ *http.Request) bool {
			if code == http.StatusUnauthorized {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			}
			http.Error(w, "refused", code)
			return true
		})
	}
	plain := serveRepository(t, dir, nil)
	for _, tc := range []struct {
		body map[string]any
		code problem.Code
	}{
		{map[string]any{"url": status(401)}, problem.GitAuthenticationFailed},
		{map[string]any{"url": status(403)}, problem.GitAuthenticationFailed},
		{map[string]any{"url": status(404)}, problem.GitRepositoryNotFound},
		{map[string]any{"url": status(500)}, problem.GitNetworkFailed},
		{map[string]any{"url": plain, "branch": "none"}, problem.GitRefNotFound},
		{map[string]any{"url": plain, "commit": strings.Repeat("0", 40)}, problem.GitRefNotFound},
		{map[string]any{"url": plain, "timeout": "1ms"}, problem.GitTimeout},
	} {
		tc.body["target_dir"] = filepath.Join(t.TempDir(), "shop")
		s.refused(tc.code, "POST", "/sandbox/box/git/clone", tc.body)
	}
}

// The rules, not the server, are the reason of a failure that they cause.
func TestCloneThatRulesDeny(t *testing.T) {
	s := newServer(t, Limits{})
	id := sandbox.ID(s.create("box"))
	must[types.RuleSet](s, http.StatusOK, "PUT", "/sandbox/box/egress/rules",
		`{"default":"inherit","rules":[{"name":"closed","hosts":["closed.test"],"action":"deny"},{"name":"open","hosts":["open.test"],"action":"allow"}]}`)
	for _, tc := range []struct {
		reason git.Reason
		url    string // in git's message
		code   problem.Code
	}{
		{git.AuthenticationFailed, "", problem.EgressDenied},
		{git.NetworkFailed, "https://closed.test/shop.git/", problem.EgressDenied},
		{git.RepositoryNotFound, "http://closed.test/shop.git/", problem.EgressDenied},
		{git.RefNotFound, "", problem.GitRefNotFound},
		{git.AuthenticationFailed, "https://open.test/shop.git/", problem.GitAuthenticationFailed},
		{git.NetworkFailed, "http://localhost:8000/shop.git/", problem.GitNetworkFailed},
		{git.NetworkFailed, "http://[::1]:8000/shop.git/", problem.GitNetworkFailed},
	} {
		err := s.api.fromGit(t.Context(), id, &git.Error{Reason: tc.reason, Message: "failed", URL: tc.url}, "https://closed.test/shop.git")
		p, ok := errors.AsType[*problem.Problem](err)
		if !ok || p.Code != tc.code {
			t.Errorf("%+v: got %v", tc, err)
			continue
		}
		if denied := tc.code == problem.EgressDenied; denied && (p.Host != "closed.test" || p.Rule != "sandbox/closed") {
			t.Errorf("%+v: got %+v", tc, p)
		}
	}
}

// Rules that permit to read and not to push.
func TestPushThatRulesDeny(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.RuleSet](s, http.StatusOK, "PUT", "/sandbox/box/egress/rules", `{"default":"inherit","rules":[
		{"name":"read-only","hosts":["shop.test"],"methods":["POST"],"paths":["/**/git-receive-pack"],"action":"deny"},
		{"name":"open","hosts":["shop.test"],"action":"allow"}]}`)
	origin, _ := newRepository(t)
	gitIn(t, origin, "config", "http.receivepack", "true")
	var denied atomic.Value
	denied.Store("git-receive-pack")
	server := serveRepository(t, origin, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, denied.Load().(string)) {
			return false
		}
		w.WriteHeader(http.StatusForbidden)
		return true
	})
	dir := filepath.Join(t.TempDir(), "shop")
	must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/clone", map[string]any{"url": server, "target_dir": dir})
	// The server stands for the node's proxy: rules do not apply to loopback addresses.
	gitIn(t, dir, "config", "http.proxy", strings.TrimSuffix(server, "/shop.git"))
	gitIn(t, dir, "remote", "set-url", "origin", "http://name:secret@shop.test/shop.git")
	must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/pull", map[string]any{"path": dir})
	gitIn(t, dir, "commit", "-q", "--allow-empty", "-m", "second")
	p := s.refused(problem.EgressDenied, "POST", "/sandbox/box/git/push", map[string]any{"path": dir})
	if p.Host != "shop.test" || p.Rule != "sandbox/read-only" || strings.Contains(fmt.Sprint(p), "secret") {
		t.Errorf("got %+v", p)
	}
	// A refusal of a request that the rules permit is the server's.
	denied.Store("git-upload-pack")
	gitIn(t, origin, "update-ref", "refs/heads/main", gitIn(t, origin, "commit-tree", "-m", "other", "-p", "main", "main^{tree}"))
	s.refused(problem.GitAuthenticationFailed, "POST", "/sandbox/box/git/pull", map[string]any{"path": dir})
}

func TestBadGitRequestsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	for _, tc := range []struct{ route, body, says string }{
		{"clone", `{}`, "body.url: missing"},
		{"clone", `{"url":""}`, "unsupported scheme"},
		{"clone", `{"url":"https://user:secret@example.com/shop.git"}`, "policy basic"},
		{"clone", `{"url":"https://token@example.com/shop.git"}`, "policy basic"},
		{"clone", `{"url":"ssh://git:secret@example.com/shop.git"}`, "has a password"},
		{"clone", `{"url":"git@example.com:team/shop.git"}`, "ssh://git@example.com"},
		{"clone", `{"url":"ext::sh -c id"}`, "space"},
		{"clone", `{"url":"ext::id"}`, "has a query, a fragment or no //"},
		{"clone", `{"url":"--upload-pack=id"}`, "unsupported scheme"},
		{"clone", `{"url":"-c"}`, "unsupported scheme"},
		{"clone", `{"url":"ssh://-oProxyCommand=id/shop"}`, "body.url"},
		{"clone", `{"url":"https://example.com/shop?x=1"}`, "has a query"},
		{"clone", `{"url":"https:///shop"}`, "has no host"},
		{"clone", `{"url":"git://example.com/shop"}`, "unsupported scheme"},
		{"clone", `{"url":"file://host/srv/shop.git"}`, "names a host"},
		{"clone", `{"url":"https://example.com/"}`, "body.target_dir"},
		{"clone", `{"url":"https://example.com/shop","branch":"--upload-pack=id"}`, "body.branch"},
		{"clone", `{"url":"https://example.com/shop","branch":"a..b"}`, "body.branch"},
		{"clone", `{"url":"https://example.com/shop","tag":"-x"}`, "body.tag"},
		{"clone", `{"url":"https://example.com/shop","commit":"main"}`, "full hash"},
		{"clone", `{"url":"https://example.com/shop","commit":"` + strings.Repeat("A", 40) + `"}`, "full hash"},
		{"clone", `{"url":"https://example.com/shop","branch":"a","tag":"b"}`, "at most one"},
		{"clone", `{"url":"https://example.com/shop","target_dir":"shop"}`, "absolute"},
		{"clone", `{"url":"https://example.com/shop","depth":0}`, "body.depth"},
		{"clone", `{"url":"https://example.com/shop","depth":-1}`, "body.depth"},
		{"clone", `{"url":"https://example.com/shop","timeout":"25h"}`, "24h"},
		{"clone", `{"url":"https://example.com/shop","env":{}}`, "unknown field"},
		{"checkout", `{"path":"/srv","ref":"--orphan"}`, "body.ref"},
		{"checkout", `{"path":"/srv","ref":""}`, "body.ref"},
		{"checkout", `{"path":"srv","ref":"main"}`, "absolute"},
		{"checkout", `{"path":"/srv","ref":"HEAD~1","create":true}`, "body.ref"},
		{"checkout", `{"path":"/srv","ref":"a","create":true,"start_point":"-b"}`, "body.start_point"},
		{"checkout", `{"path":"/srv","ref":"a","start_point":"b"}`, "without create"},
		{"add", `{"path":"/srv","files":[""]}`, "body.files[0]"},
		{"commit", `{"path":"/srv","message":" "}`, "body.message"},
		{"commit", `{"path":"/srv","message":"x","all":true,"files":["a"]}`, "body.files"},
		{"commit", `{"path":"/srv","message":"x","author":{"name":"a","email":"<b>"}}`, "body.author.email"},
		{"push", `{"path":"/srv","remote":"https://example.com/shop"}`, "body.remote"},
		{"push", `{"path":"/srv","remote":"--receive-pack=id"}`, "body.remote"},
		{"push", `{"path":"/srv","branch":"a:b"}`, "body.branch"},
		{"pull", `{"path":"/srv","branch":"main"}`, "without remote"},
	} {
		p := s.refused(problem.RequestInvalid, "POST", "/sandbox/box/git/"+tc.route, tc.body)
		if !strings.Contains(p.Detail, tc.says) {
			t.Errorf("%s %s: the detail is %q", tc.route, tc.body, p.Detail)
		}
		if strings.Contains(p.Detail, "secret@") || strings.Contains(p.Detail, "token@") {
			t.Errorf("%s: the detail repeats the credential: %q", tc.body, p.Detail)
		}
	}
	for _, query := range []string{"status", "status?path=srv", "diff?path=/srv&to=main", "diff?path=/srv&from=-x", "diff?path=/srv&from=a&to=b&staged=true", "log?path=/srv&ref=a..b", "log?path=/srv&max_commits=1001"} {
		s.refused(problem.RequestInvalid, "GET", "/sandbox/box/git/"+query, nil)
	}
	if state := s.state(id); state != "asleep" {
		t.Errorf("refusals made the sandbox %s", state)
	}
}

// From the clone of a repository to the push of a change.
func TestGitWorkflow(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	origin, first := newRepository(t)
	gitIn(t, origin, "config", "http.receivepack", "true")
	dir := filepath.Join(t.TempDir(), "shop")
	at := "?path=" + url.QueryEscape(dir)
	post := func(route string, body map[string]any) types.GitHead {
		t.Helper()
		body["path"] = dir
		return must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/"+route, body)
	}
	status := func() types.GitStatus {
		t.Helper()
		return must[types.GitStatus](s, http.StatusOK, "GET", "/sandbox/box/git/status"+at, nil)
	}
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/clone", map[string]any{"url": serveRepository(t, origin, nil), "target_dir": dir})
	want := types.GitStatus{GitHead: types.GitHead{Path: dir, Branch: "main", Commit: first}, Upstream: "origin/main", Clean: true, Files: []types.GitFile{}}
	if diff := cmp.Diff(want, status()); diff != "" {
		t.Error(diff)
	}

	if got := post("checkout", map[string]any{"ref": "cart", "create": true}); got.Branch != "cart" || got.Commit != first {
		t.Errorf("got %+v", got)
	}
	s.refused(problem.GitConflict, "POST", "/sandbox/box/git/checkout", map[string]any{"path": dir, "ref": "cart", "create": true})
	s.refused(problem.GitRefNotFound, "POST", "/sandbox/box/git/checkout", map[string]any{"path": dir, "ref": "none"})
	write("app.js", "one\n2\n")
	write("new file", "new\n")
	want.Branch, want.Upstream, want.Clean = "cart", "", false
	want.Files = []types.GitFile{
		{Path: "app.js", Index: types.GitChangeUnmodified, Worktree: types.GitChangeModified},
		{Path: "new file", Index: types.GitChangeUntracked, Worktree: types.GitChangeUntracked},
	}
	if diff := cmp.Diff(want, status()); diff != "" {
		t.Error(diff)
	}
	patch := must[types.GitDiff](s, http.StatusOK, "GET", "/sandbox/box/git/diff"+at, nil)
	if !strings.Contains(patch.Patch, "\n-two\n+2\n") || patch.Truncated || !slices.Equal(patch.Files, []types.GitDiffFile{{Path: "app.js", LinesAdded: 1, LinesDeleted: 1}}) {
		t.Errorf("got %+v", patch)
	}
	if cut := must[types.GitDiff](s, http.StatusOK, "GET", "/sandbox/box/git/diff"+at+"&max_bytes=10", nil); cut.Patch != patch.Patch[:10] || !cut.Truncated {
		t.Errorf("got %+v", cut)
	}

	s.refused(problem.GitAuthorRequired, "POST", "/sandbox/box/git/commit", map[string]any{"path": dir, "message": "x", "all": true})
	author := map[string]any{"name": "Shop agent", "email": "agent@example.com"}
	committed := post("commit", map[string]any{"message": "Add the cart\n\nDetails.", "author": author})
	if committed.Commit == first || committed.Branch != "cart" {
		t.Errorf("got %+v", committed)
	}
	s.refused(problem.GitChangesRequired, "POST", "/sandbox/box/git/commit", map[string]any{"path": dir, "message": "x", "author": author})
	history := must[types.GitLog](s, http.StatusOK, "GET", "/sandbox/box/git/log"+at, nil)
	if len(history.Commits) != 2 || history.Truncated || history.Commits[0].Message != "Add the cart\n\nDetails.\n" || history.Commits[0].Author.Name != "Shop agent" ||
		!slices.Equal(history.Commits[0].Parents, []string{first}) || len(history.Commits[1].Parents) != 0 {
		t.Errorf("got %+v", history)
	}
	if one := must[types.GitLog](s, http.StatusOK, "GET", "/sandbox/box/git/log"+at+"&max_commits=1", nil); len(one.Commits) != 1 || !one.Truncated {
		t.Errorf("got %+v", one)
	}
	staged := must[types.GitDiff](s, http.StatusOK, "GET", "/sandbox/box/git/diff"+at+"&from=main&to=cart&file="+url.QueryEscape("new file"), nil)
	if len(staged.Files) != 1 || staged.Files[0].Path != "new file" {
		t.Errorf("got %+v", staged)
	}

	pushed := must[types.GitPushResult](s, http.StatusOK, "POST", "/sandbox/box/git/push", map[string]any{"path": dir, "set_upstream": true})
	if len(pushed.Refs) != 1 || pushed.Refs[0].Ref != "refs/heads/cart" || pushed.Refs[0].Status != types.GitPushStatusCreated {
		t.Errorf("got %+v", pushed)
	}
	if got := gitIn(t, origin, "rev-parse", "cart"); got != committed.Commit {
		t.Errorf("the server has %s", got)
	}
	branches := must[types.GitBranchList](s, http.StatusOK, "GET", "/sandbox/box/git/branches"+at, nil)
	wantBranches := []types.GitBranch{
		{Name: "cart", Current: true, Commit: committed.Commit, Upstream: "origin/cart"}, {Name: "main", Commit: first, Upstream: "origin/main"},
		{Name: "origin/cart", Remote: true, Commit: committed.Commit}, {Name: "origin/main", Remote: true, Commit: first},
	}
	if diff := cmp.Diff(wantBranches, branches.Branches); diff != "" {
		t.Error(diff)
	}

	// The server has another commit: pull fast-forwards, and does not merge.
	other := filepath.Join(t.TempDir(), "other")
	gitIn(t, "", "clone", "-q", "-b", "cart", origin, other)
	gitIn(t, other, "commit", "-q", "--allow-empty", "-m", "third")
	gitIn(t, other, "push", "-q")
	third := gitIn(t, other, "rev-parse", "HEAD")
	post("commit", map[string]any{"message": "diverged", "author": author, "allow_empty": true})
	s.refused(problem.GitConflict, "POST", "/sandbox/box/git/push", map[string]any{"path": dir})
	s.refused(problem.GitConflict, "POST", "/sandbox/box/git/pull", map[string]any{"path": dir})
	if got := status(); got.Ahead != 1 || got.Behind != 1 {
		t.Errorf("got %+v", got)
	}
	gitIn(t, dir, "reset", "-q", "--hard", committed.Commit)
	if got := post("pull", map[string]any{}); got.Commit != third {
		t.Errorf("got %+v", got)
	}
	if again := must[types.GitPushResult](s, http.StatusOK, "POST", "/sandbox/box/git/push", map[string]any{"path": dir}); again.Refs[0].Status != types.GitPushStatusUpToDate {
		t.Errorf("got %+v", again)
	}

	write("app.js", "mine\n")
	s.refused(problem.GitConflict, "POST", "/sandbox/box/git/checkout", map[string]any{"path": dir, "ref": "main"})
	if got := post("checkout", map[string]any{"ref": "main", "force": true}); got.Branch != "main" {
		t.Errorf("got %+v", got)
	}
	must[struct{}](s, http.StatusNoContent, "POST", "/sandbox/box/git/add", map[string]any{"path": dir})
	s.refused(problem.PathNotFound, "POST", "/sandbox/box/git/add", map[string]any{"path": dir, "files": []string{"*"}})
	s.refused(problem.GitPathInvalid, "GET", "/sandbox/box/git/status?path="+url.QueryEscape(t.TempDir()), nil)
	s.refused(problem.PathNotFound, "GET", "/sandbox/box/git/status?path=/none", nil)
	gitIn(t, origin, "config", "receive.denyDeletes", "true")
	hook := filepath.Join(origin, "hooks", "update")
	if err := os.WriteFile(hook, []byte("#!/bin/sh\necho protected branch\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	post("commit", map[string]any{"message": "fourth", "author": author, "allow_empty": true})
	if p := s.refused(problem.GitPushDenied, "POST", "/sandbox/box/git/push", map[string]any{"path": dir}); !strings.Contains(p.Detail, "protected branch") {
		t.Errorf("the detail is %q", p.Detail)
	}
}
