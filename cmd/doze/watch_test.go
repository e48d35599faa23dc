package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/testkit"
)

func TestWatchPrintsChangesUntilTheSandboxStops(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	dir := t.TempDir()
	watcher := r.program("watch", "--include", "*.go", "-e", "skipped", "a", dir)
	var errs strings.Builder
	watcher.Stderr = &errs
	lines := bufio.NewScanner(r.output(watcher))
	jsonWatcher := r.program("watch", "--json", "a", dir)
	messages := json.NewDecoder(r.output(jsonWatcher))
	var first client.Change
	if err := messages.Decode(&first); err != nil || first.Watching == nil || first.Watching.Path != dir {
		t.Fatalf("%+v, %v", first, err)
	}
	// The watcher does not print that it has begun with --include: make names until it prints one.
	begun := make(chan string, 1)
	go func() {
		lines.Scan()
		begun <- lines.Text()
	}()
	n := 0
	testkit.Eventually(t, "the watch begins", func() bool {
		n++
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprintf("%d.go", n)), 0o755); err != nil {
			t.Fatal(err)
		}
		return len(begun) > 0
	})
	if line := <-begun; !regexp.MustCompile(`^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  create  ` + regexp.QuoteMeta(dir) + `/\d+\.go/$`).MatchString(line) {
		t.Errorf("printed %q", line)
	}
	for _, name := range []string{"skipped", "skipped/a.go", "a.txt", "\x1b[2J\xff.go"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(dir, "a.txt"), filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	var rest []string
	for lines.Scan() {
		line := lines.Text()
		rest = append(rest, line[25:])
		if strings.Contains(line, " move ") {
			break
		}
	}
	if got := strings.Join(rest[len(rest)-2:], "\n"); got != "create  "+dir+"/ [2J�.go/\nmove    "+dir+"/a.txt/ → "+dir+"/b/" {
		t.Errorf("printed %q", got)
	}
	var move client.Change
	for move.Event == nil || move.Event.Type != "move" {
		if err := messages.Decode(&move); err != nil {
			t.Fatal(err)
		}
	}
	r.ok("stop", "a")
	for lines.Scan() {
		t.Errorf("printed %q", lines.Text())
	}
	if err := watcher.Wait(); err == nil || !strings.Contains(errs.String(), "doze: watching "+dir) || !strings.HasSuffix(errs.String(), "doze: the watch has ended: the sandbox is stopped (requested)\n") {
		t.Errorf("%v, %q", err, errs.String())
	}
	var last client.Change
	if err := messages.Decode(&last); err != nil || last.Stopped == nil || last.Stopped.StateReason != "requested" {
		t.Errorf("%+v, %v", last, err)
	}
	if jsonWatcher.Wait() == nil {
		t.Error("the watch with --json succeeded")
	}
}

// A follower goes on after the last change that it printed.
func TestWatchGoesOnWhenTheNodeIsBack(t *testing.T) {
	var cursors []string
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		if !strings.HasSuffix(req.URL.Path, "/files/watch") {
			fmt.Fprint(w, `{"id":"k3f9x2m7q2az","name":"a"}`)
			return
		}
		cursors = append(cursors, req.Header.Get("Last-Event-ID")+"?"+req.URL.RawQuery)
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "event: watching\ndata: {\"path\":\"/a\",\"cursor\":\"x-0\",\"directories\":1}\n\n")
		if len(cursors) == 1 {
			fmt.Fprint(w, "event: event\ndata: {\"type\":\"modify\",\"path\":\"/a/b\",\"cursor\":\"x-1\"}\n\n")
			fmt.Fprint(w, "event: overflow\ndata: {\"reason\":\"path_unreadable\",\"detail\":\"lost\",\"path\":\"/a/c\",\"cursor\":\"x-2\"}\n\n")
			return
		}
		fmt.Fprint(w, "event: stopped\ndata: {\"reason\":\"root_deleted\",\"detail\":\"gone\"}\n\n")
	})
	got := r.doze("watch", "--all", "--no-recursive", "a", "/a")
	if got.code != exitFailed || !strings.HasSuffix(got.out, "  modify  /a/b\n") || got.err != "doze: watching /a, 1 directories\ndoze: some changes were missed: lost /a/c\ndoze: the watch has ended: gone\n" {
		t.Errorf("got %+v", got)
	}
	testkit.Diff(t, "requests", cursors, []string{"?exclude=&path=%2Fa&recursive=false", "x-2?exclude=&path=%2Fa&recursive=false"})
	r.misused("--all and --exclude exclude", "watch", "--all", "-e", "x", "a", "/a")
	r.misused("PATH is missing", "watch", "a")
}
