package api

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func watchPath(dir string, more ...string) string {
	return "/sandbox/box/files/watch?path=" + url.QueryEscape(dir) + strings.Join(more, "")
}

func makeDirectory(t *testing.T, path ...string) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(path...), 0o755); err != nil {
		t.Fatal(err)
	}
}

// expectEvent expects a change.
func (e *events) expectEvent(want types.FileEvent) sse {
	e.t.Helper()
	ev := e.expect("event")
	got := parse[types.FileEvent](e.t, ev)
	if got.Cursor == "" || ev.id != got.Cursor {
		e.t.Errorf("cursor %q, id %q", got.Cursor, ev.id)
	}
	got.Cursor = ""
	testkit.Diff(e.t, "event", got, want)
	return ev
}

func TestWatchSendsChangesAndResumes(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	makeDirectory(t, dir, "node_modules")
	w := s.open("GET", watchPath(dir), nil)
	started := parse[types.WatchStarted](t, w.expect("watching"))
	testkit.Diff(t, "watching", started, types.WatchStarted{
		Path: dir, Recursive: true, Include: []string{}, Exclude: []string{".git", "node_modules"}, Directories: 1, Cursor: started.Cursor,
	})
	makeDirectory(t, dir, "a")
	first := w.expectEvent(types.FileEvent{Type: "create", Path: dir + "/a", IsDir: true})
	w.close()
	makeDirectory(t, dir, "node_modules", "x")
	if err := os.Rename(dir+"/a", dir+"/b"); err != nil {
		t.Fatal(err)
	}
	w = s.open("GET", watchPath(dir), nil, "Last-Event-ID", first.id)
	if again := parse[types.WatchStarted](t, w.expect("watching")); !again.Resumed || again.Cursor != first.id {
		t.Errorf("got %+v", again)
	}
	w.expectEvent(types.FileEvent{Type: "move", Path: dir + "/b", From: dir + "/a", IsDir: true})
	w.close()
	w = s.open("GET", watchPath(dir), nil, "Last-Event-ID", "aaaaaaaa-7")
	w.expect("watching")
	if o := parse[types.WatchOverflow](t, w.expect("overflow")); o.Reason != "cursor_expired" || o.Cursor == "" || o.Detail == "" {
		t.Errorf("got %+v", o)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for {
		ev, ok := w.next()
		if !ok {
			t.Fatal("the stream ended without stopped")
		}
		if ev.name != "stopped" {
			continue
		}
		if stopped := parse[types.WatchStopped](t, ev); stopped.Reason != "root_deleted" || stopped.Detail == "" || ev.id != "" {
			t.Errorf("got %+v", stopped)
		}
		break
	}
	w.expectEnd()
}

func TestWatchFilters(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	for _, tt := range []struct {
		query string
		want  []string
	}{
		{"", []string{"a.go", "sub", "sub/b.go", "sub/b.txt", "end.go"}},
		{"&recursive=false", []string{"a.go", "sub", "end.go"}},
		{"&include=*.go", []string{"a.go", "sub/b.go", "end.go"}},
		{"&include=sub/**&include=end.go", []string{"sub/b.go", "sub/b.txt", "end.go"}},
		{"&exclude=sub&exclude=a.*", []string{".git", "end.go"}},
		{"&exclude=", []string{".git", "a.go", "sub", "sub/b.go", "sub/b.txt", "end.go"}},
	} {
		t.Run(tt.query, func(t *testing.T) {
			dir := filepath.Join(dir, fmt.Sprintf("%x", tt.query+"x"))
			makeDirectory(t, dir)
			w := s.open("GET", watchPath(dir, tt.query), nil)
			w.expect("watching")
			for _, name := range []string{".git", "a.go", "sub", "sub/b.go", "sub/b.txt", "end.go"} {
				makeDirectory(t, dir, name)
			}
			seen := map[string]bool{}
			for !seen["end.go"] {
				name := strings.TrimPrefix(parse[types.FileEvent](t, w.expect("event")).Path, dir+"/")
				if seen[name] {
					t.Errorf("%s is reported twice", name)
				}
				seen[name] = true
			}
			want := map[string]bool{}
			for _, name := range tt.want {
				want[name] = true
			}
			testkit.Diff(t, "names", seen, want)
		})
	}
}

func TestWatchOfNamesThatAreNotText(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	w := s.open("GET", watchPath(dir), nil)
	w.expect("watching")
	makeDirectory(t, dir, "x\n\nevent: stopped\ndata: {}\n")
	w.expectEvent(types.FileEvent{Type: "create", Path: dir + "/x\n\nevent: stopped\ndata: {}\n", IsDir: true})
	makeDirectory(t, dir, "\xff")
	encoded := base64.StdEncoding.EncodeToString([]byte(dir + "/\xff"))
	w.expectEvent(types.FileEvent{Type: "create", Path: encoded, PathEncoding: "base64", IsDir: true})
	if err := os.Rename(dir+"/\xff", dir+"/plain"); err != nil {
		t.Fatal(err)
	}
	w.expectEvent(types.FileEvent{Type: "move", Path: base64.StdEncoding.EncodeToString([]byte(dir + "/plain")), From: encoded, PathEncoding: "base64", IsDir: true})
}

func TestWatchOutlivesSleepAndEndsWithAStop(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	s.sleep(id)
	w := s.open("GET", watchPath(dir), nil)
	w.expect("watching")
	if state := s.state(id); state != sandbox.StateRunning {
		t.Fatalf("the sandbox is %s", state)
	}
	s.sleep(id) // a watch does not prevent it
	resumed := s.open("GET", watchPath(dir), nil, "Last-Event-ID", "aaaaaaaa-0")
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Fatalf("the sandbox is %s", state)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/wake", nil)
	resumed.expect("watching")
	resumed.expect("overflow")
	makeDirectory(t, dir, "a")
	w.expectEvent(types.FileEvent{Type: "create", Path: dir + "/a", IsDir: true})
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	for _, w := range []*events{w, s.open("GET", watchPath(dir), nil, "Last-Event-ID", "aaaaaaaa-0")} {
		got := parse[types.WatchStopped](t, w.expect("stopped"))
		testkit.Diff(t, "stopped", got, types.WatchStopped{Reason: "sandbox_ended", State: "stopped", StateReason: "requested", Detail: "the sandbox is stopped (requested)"})
		w.expectEnd()
	}
	if state := s.state(id); state != sandbox.StateStopped {
		t.Errorf("the sandbox is %s", state)
	}
}

func TestWatchEndsWhenItsSandboxIsDestroyed(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	w := s.open("GET", watchPath(t.TempDir()), nil)
	w.expect("watching")
	s.do("DELETE", "/sandbox/box", nil)
	if got := parse[types.WatchStopped](t, w.expect("stopped")); got.Reason != "sandbox_ended" || got.State != "destroyed" {
		t.Errorf("got %+v", got)
	}
	w.expectEnd()
}

func TestClientThatLeavesAWatchLeaksNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	w := s.open("GET", watchPath(dir), nil)
	w.expect("watching")
	w.close()
	s.sleep(id)
	waiting := s.open("GET", watchPath(dir), nil, "Last-Event-ID", "aaaaaaaa-0")
	waiting.close()
	s.eventually("no stream is held", func() bool { return s.api.streams.pool.Used() == 0 })
	if head := s.do("HEAD", watchPath(dir), nil); head.status != http.StatusOK || len(head.body) > 0 {
		t.Errorf("HEAD: status %d: %q", head.status, head.body)
	}
}

func TestBadWatchesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	dir := t.TempDir()
	long := strings.Repeat("a", guest.MaxPattern+1)
	for query, hint := range map[string]string{
		"": "path", "?path=relative": "absolute", "?path=/%ff": "UTF-8", "?path=/a&path=/b": "once", "?path=/a&recursive=maybe": "recursive",
		"?path=/a&include=[": "query.include[0]", "?path=/a&include=*.go&include=": "query.include[1]", "?path=/a&exclude=../b": "query.exclude[0]", "?path=/a&exclude=a**": "whole component",
		"?path=/a&include=" + long: "256", "?path=/a" + strings.Repeat("&include=a", guest.MaxPatterns+1): "32", "?path=/a&hidden=true": "unknown parameter",
	} {
		if p := s.refused(problem.RequestInvalid, "GET", "/sandbox/box/files/watch"+query, nil); !strings.Contains(fmt.Sprint(p.Detail, p.Errors), hint) {
			t.Errorf("%.80s: detail %q without %q", query, p.Detail, hint)
		}
	}
	for _, cursor := range []string{"7", "aaaaaaaa", "aaaaaaaa-", "aaaaaaaa--1", "AAAAAAAA-1", "aaaaaaaa-99999999999999999999", "a\xffaaaaaa-1"} {
		s.refused(problem.RequestInvalid, "GET", watchPath(dir), nil, "Last-Event-ID", cursor)
	}
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Errorf("a refused request woke the sandbox: it is %s", state)
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/files/watch?path=/a", nil)
	s.refused(problem.PathNotFound, "GET", watchPath(dir+"/missing"), nil)
	for range guest.MaxWatches {
		s.open("GET", watchPath(dir), nil).expect("watching")
	}
	s.refused(problem.WatchLimitExceeded, "GET", watchPath(dir), nil)
}

func TestReasonsOfWatchesAreDescribed(t *testing.T) {
	for _, reason := range types.WatchStopReason("").Values() {
		if reason != types.WatchStopReasonSandboxEnded && stopDetails[guest.WatchReason(reason)] == "" {
			t.Errorf("%s has no detail", reason)
		}
	}
	for _, reason := range types.WatchOverflowReason("").Values() {
		if overflowDetails[guest.WatchReason(reason)] == "" {
			t.Errorf("%s has no detail", reason)
		}
	}
}
