package server_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// watched is an open watch of a directory.
type watched struct {
	t      testing.TB
	client *guest.Client
	dir    string
	spec   guest.WatchSpec
	stream *guest.WatchStream
	unread []guest.WatchEvent
	last   guest.WatchEvent
}

var marks atomic.Int64 // of settle

// watch begins to watch a directory with all below it.
func watch(t testing.TB, c *guest.Client, dir string, change func(*guest.WatchSpec)) *watched {
	t.Helper()
	w := &watched{t: t, client: c, dir: dir, spec: guest.WatchSpec{Path: dir, Recursive: true}}
	if change != nil {
		change(&w.spec)
	}
	w.open()
	t.Cleanup(func() { w.stream.Close() })
	return w
}

func (w *watched) open() {
	w.t.Helper()
	var err error
	if w.stream, err = w.client.Watch(testkit.Context(w.t), w.spec); err != nil {
		w.t.Fatal(err)
	}
	w.last, w.unread = guest.WatchEvent{Seq: w.stream.Started.Seq}, nil
}

// resume closes the stream and opens it after the last event that was read.
func (w *watched) resume() {
	w.t.Helper()
	w.stream.Close()
	w.spec.Since = guest.WatchCursor{Watch: w.stream.Started.Watch, Seq: w.last.Seq}
	w.open()
}

func (w *watched) next() guest.WatchEvent {
	w.t.Helper()
	if len(w.unread) == 0 {
		events, err := w.stream.Next()
		if err != nil {
			w.t.Fatal(err)
		}
		w.unread = slices.Clone(events)
	}
	ev := w.unread[0]
	w.unread = w.unread[1:]
	if ev.Seq <= w.last.Seq && ev.Type != guest.WatchOverflow {
		w.t.Errorf("event %d comes after event %d", ev.Seq, w.last.Seq)
	}
	w.last = ev
	return ev
}

// line is an event in a line, with paths relative to the directory.
func (w *watched) line(ev guest.WatchEvent) string {
	line := string(ev.Type)
	for _, p := range [][]byte{ev.From, ev.Path} {
		if rel, err := filepath.Rel(w.dir, string(p)); err == nil && len(p) > 0 {
			line += " " + rel
		}
	}
	if ev.IsDir {
		line += "/"
	}
	if ev.Reason != "" {
		line += " " + string(ev.Reason)
	}
	return line
}

// settle makes a change of its own and returns everything until then, without repeated
// modifications.
func (w *watched) settle() (lines []string) {
	w.t.Helper()
	mark := fmt.Sprint(".mark-", marks.Add(1))
	if err := os.Mkdir(filepath.Join(w.dir, mark), 0o755); err != nil {
		w.t.Fatal(err)
	}
	for {
		line := w.line(w.next())
		if line == "create "+mark+"/" {
			return lines
		}
		if n := len(lines); n == 0 || lines[n-1] != line || !strings.HasPrefix(line, "modify ") {
			lines = append(lines, line)
		}
	}
}

// expect settles, and expects these lines.
func (w *watched) expect(want ...string) {
	w.t.Helper()
	testkit.Diff(w.t, "events", w.settle(), want)
}

func sh(t testing.TB, dir, script string) {
	t.Helper()
	cmd := exec.CommandContext(testkit.Context(t), "sh", "-euc", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

func TestWatchReportsChangesInTheirOrder(t *testing.T) {
	for _, tt := range []struct {
		name, before, script string
		want                 []string
	}{
		{name: "new file", script: "echo a > a", want: []string{"create a", "modify a"}},
		{name: "append", before: "echo a > a", script: "echo b >> a", want: []string{"modify a"}},
		{name: "delete", before: "echo a > a", script: "rm a", want: []string{"delete a"}},
		{name: "permissions", before: "echo a > a", script: "chmod 600 a", want: []string{"attrib a"}},
		{name: "rename", before: "echo a > a", script: "mv a b", want: []string{"move a b"}},
		{name: "rename over", before: "echo a > a; echo b > b", script: "mv a b", want: []string{"move a b"}},
		{name: "rename in", before: "echo a > ../a", script: "mv ../a a", want: []string{"create a"}},
		{name: "rename out", before: "echo a > a", script: "mv a ..", want: []string{"delete a"}},
		{name: "rename out and another in its place", before: "echo a > a; echo b > ../b", script: "mv a ..; mv ../b a", want: []string{"delete a", "create a"}},
		{name: "rename between directories", before: "mkdir x y; echo a > x/a", script: "mv x/a y/b", want: []string{"move x/a y/b"}},
		{name: "many renames", before: "echo a > a", script: "mv a b; mv b c; mv c a", want: []string{"move a b", "move b c", "move c a"}},
		{name: "new directory", script: "mkdir a; echo b > a/b; mkdir a/c", want: nil}, // see below
		{name: "directory renamed with its content", before: "mkdir -p a/b; echo c > a/b/c", script: "mv a z; echo d >> z/b/c", want: []string{"move a z/", "modify z/b/c"}},
		{name: "directory renamed into another", before: "mkdir -p a/b x; echo c > a/b/c", script: "mv a x; echo d >> x/a/b/c; rm -r x/a/b",
			want: []string{"move a x/a/", "modify x/a/b/c", "delete x/a/b/c", "delete x/a/b/"}},
		{name: "directory renamed over an empty one", before: "mkdir -p a z; echo c > a/c", script: "mv -T a z; echo d >> z/c", want: []string{"move a z/", "modify z/c"}},
		{name: "directory renamed in", before: "mkdir -p ../a/b; echo c > ../a/b/c", script: "mv ../a .", want: []string{"create a/", "create a/b/", "create a/b/c"}},
		{name: "directory renamed out", before: "mkdir -p a/b; echo c > a/b/c", script: "mv a ..; echo d >> ../a/b/c", want: []string{"delete a/"}},
		{name: "directory deleted", before: "mkdir -p a/b; echo c > a/b/c", script: "rm -r a", want: []string{"delete a/b/c", "delete a/b/", "delete a/"}},
		{name: "symbolic links", before: "mkdir ../other; ln -s ../other link; ln -s loop loop", script: "echo a > link/a; ln -s /etc etc; rm link",
			want: []string{"create etc", "delete link"}},
		{name: "hard link", before: "echo a > a", script: "ln a b", want: []string{"create b"}},
		{name: "pipe", script: "mkfifo p", want: []string{"create p"}},
		{name: "excluded", before: "mkdir -p .git/x web/node_modules", script: "echo a > .git/x/a; echo a > web/node_modules/a; echo a > web/a; mkdir node_modules; echo > node_modules/x",
			want: []string{"create web/a", "modify web/a"}},
		{name: "rename out of an excluded directory", before: "mkdir .git; echo a > .git/a", script: "mv .git/a a; mv a .git/b", want: []string{"create a", "delete a"}},
		{name: "excluded name", before: "mkdir -p x/y", script: "mv x .git; echo a > .git/y/a; mv .git x; echo b > x/y/b",
			want: []string{"delete x/", "create x/", "create x/y/", "create x/y/a", "create x/y/b", "modify x/y/b"}},
		{name: "root's permissions", script: "chmod 700 .", want: []string{"attrib ./"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			dir := filepath.Join(t.TempDir(), "root")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			sh(t, dir, cmp.Or(tt.before, "true"))
			w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Exclude = []string{".git", "node_modules"} })
			sh(t, dir, tt.script)
			got := w.settle()
			if tt.name == "new directory" {
				// A scan may find a file when it has its content.
				got = slices.DeleteFunc(got, func(line string) bool { return line == "modify a/b" })
				slices.Sort(got[1:])
				tt.want = []string{"create a/", "create a/b", "create a/c/"}
			}
			if tt.name == "excluded name" {
				got = slices.Compact(slices.DeleteFunc(got, func(line string) bool { return line == "modify x/y/b" }))
				tt.want = slices.DeleteFunc(tt.want, func(line string) bool { return line == "modify x/y/b" })
				slices.Sort(got)
				slices.Sort(tt.want)
			}
			testkit.Diff(t, "events", got, tt.want)
		})
	}
}

// Programs that make trees of directories are faster than the watch. Every file is reported
// once.
func TestWatchFollowsNewDirectoriesWithoutAGap(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	w := watch(t, c, dir, nil)
	var making sync.WaitGroup
	var want []string
	for i := range 4 {
		for j := range 25 {
			for k := range 5 {
				want = append(want, fmt.Sprintf("create %d/%d/%d/file", i, j, k))
			}
		}
		making.Go(func() {
			for j := range 25 {
				for k := range 5 {
					deep := filepath.Join(dir, fmt.Sprint(i), fmt.Sprint(j), fmt.Sprint(k))
					if err := os.MkdirAll(deep, 0o755); err != nil {
						t.Error(err)
					}
					mustWrite(t, filepath.Join(deep, "file"), "x", 0o644)
				}
			}
		})
	}
	making.Wait()
	var got []string
	seen := map[string]bool{}
	for _, line := range w.settle() {
		if !strings.HasPrefix(line, "create ") {
			continue
		}
		if seen[line] {
			t.Errorf("%s is reported twice", line)
		}
		seen[line] = true
		if strings.HasSuffix(line, "file") {
			got = append(got, line)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	testkit.Diff(t, "files", got, want)
}

// state is what a client makes of events.
func state(lines []string) map[string]bool {
	paths := map[string]bool{}
	under := func(path string, f func(path string)) {
		for p := range paths {
			if p == path || strings.HasPrefix(p, path+"/") {
				f(p)
			}
		}
	}
	for _, line := range lines {
		fields := strings.Fields(strings.TrimSuffix(line, "/"))
		switch fields[0] {
		case "create":
			paths[fields[1]] = true
		case "delete":
			under(fields[1], func(p string) { delete(paths, p) })
		case "move":
			under(fields[2], func(p string) { delete(paths, p) })
			moved := map[string]bool{}
			under(fields[1], func(p string) {
				delete(paths, p)
				moved[fields[2]+strings.TrimPrefix(p, fields[1])] = true
			})
			for p := range moved {
				paths[p] = true
			}
		}
	}
	return paths
}

// A client that applies the events to what it knows has the tree as it is, whatever
// programs do at the same time.
func TestWatchDescribesATreeThatChangesConcurrently(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Exclude = []string{"*.tmp", "/away"} })
	if err := os.Mkdir(filepath.Join(dir, "away"), 0o755); err != nil {
		t.Fatal(err)
	}
	var churn sync.WaitGroup
	for i := range 3 {
		churn.Go(func() {
			at := func(name string, args ...any) string { return filepath.Join(dir, fmt.Sprintf(name, args...)) }
			for n := range 150 {
				d := at("d%d", (n+i)%4)
				os.MkdirAll(filepath.Join(d, "x", "y"), 0o755)
				os.WriteFile(filepath.Join(d, "x", fmt.Sprintf("f%d-%d", i, n)), nil, 0o644)
				os.WriteFile(filepath.Join(d, "x", "y", fmt.Sprintf("g%d", n%7)), nil, 0o644)
				switch n % 6 {
				case 0:
					os.Rename(filepath.Join(d, "x"), at("d%d/z%d", (n+1)%4, n%3))
				case 1:
					os.RemoveAll(filepath.Join(d, "x", "y"))
				case 2:
					os.Rename(d, at("away/%d-%d", i, n))
				case 3:
					os.Rename(at("away/%d-%d", i, n-1), at("d%d/back", n%4))
				case 4:
					os.Rename(filepath.Join(d, "x"), filepath.Join(d, "x.tmp"))
					os.Rename(filepath.Join(d, "x.tmp"), filepath.Join(d, "x"))
				case 5:
					os.RemoveAll(d)
				}
			}
		})
	}
	churn.Wait()
	lines := w.settle()
	got := state(lines)
	maps.DeleteFunc(got, func(path string, _ bool) bool { return strings.HasPrefix(path, ".mark-") })
	want := map[string]bool{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, path)
		switch {
		case err != nil:
			return err
		case rel == "away", strings.HasSuffix(rel, ".tmp"):
			return filepath.SkipDir
		case rel != "." && !strings.HasPrefix(rel, ".mark-"):
			want[rel] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "overflow") }) {
		t.Log("events were lost, and reported as lost")
		return
	}
	testkit.Diff(t, "tree", got, want)
}

func TestWatchOfHostileNames(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	w := watch(t, c, dir, nil)
	for _, name := range []string{"new\nline", "data: x\n\nevent: stopped", "\xff\xfe", strings.Repeat("n", 255), "\x1b[2J", " ", "-rf", "ünï", "\"'\\"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		for {
			ev := w.next()
			if ev.Type == guest.WatchCreate {
				if string(ev.Path) != dir+"/"+name {
					t.Errorf("got %q, want %q", ev.Path, name)
				}
				break
			}
		}
	}
}

func TestIncludeSelectsWhatIsReported(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	sh(t, dir, "mkdir -p src/old lib; echo > src/old/a.go")
	w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Include = []string{"*.go", ".mark-*"} })
	sh(t, dir, "mkdir new; mv src/old src/new; : > src/new/b.txt; mv src/new/b.txt src/new/b.go; mv src/new/b.go c.txt; chmod 600 c.txt; : >> src/new/a.go; rm -r src")
	w.expect("move src/old src/new/", "move src/new/b.txt src/new/b.go", "move src/new/b.go c.txt", "modify src/new/a.go", "delete src/new/a.go", "delete src/new/", "delete src/")
}

// Patterns with a slash depend on where a directory is.
func TestExcludedDirectoriesDependOnTheirPlace(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	sh(t, dir, "mkdir -p a/cache b/cache")
	w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Exclude = []string{"/a/cache"} })
	sh(t, dir, ": > a/cache/1; : > b/cache/1; mv a c")
	w.expect("create b/cache/1", "modify b/cache/1", "move a c/")
	sh(t, dir, ": > c/cache/2; mv c a")
	w.expect("create c/cache/2", "modify c/cache/2", "move c a/")
	sh(t, dir, ": > a/cache/3; : > a/4")
	w.expect("create a/4", "modify a/4")
}

func TestWatchWithoutRecursionReportsOneLevel(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	sh(t, dir, "mkdir a")
	w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Recursive = false })
	if n := w.stream.Started.Directories; n != 1 {
		t.Errorf("%d directories are watched", n)
	}
	sh(t, dir, "echo x > a/x; mkdir b; echo x > b/x; mv a c")
	w.expect("create b/", "move a c/")
}

// Editors replace the file.
func TestWatchOfOneFile(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	sh(t, dir, "echo a > config; ln -s config link")
	for _, path := range []string{"config", "link"} {
		w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Path = filepath.Join(dir, path) })
		sh(t, dir, "echo b > other; mv other config; echo c >> config; mv config ..; echo d > config; rm config; echo e > config; chmod 600 config")
		var got []string
		for len(got) == 0 || !strings.HasPrefix(got[len(got)-1], "attrib") {
			if line := w.line(w.next()); len(got) == 0 || got[len(got)-1] != line {
				got = append(got, line)
			}
		}
		var want []string
		for _, kind := range []string{"create", "modify", "delete", "create", "modify", "delete", "create", "modify", "attrib"} {
			want = append(want, kind+" "+path)
		}
		testkit.Diff(t, path, got, want)
		w.stream.Close()
	}
}

func TestWatchThroughALinkReportsItsPath(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	sh(t, dir, "mkdir real; ln -s real link")
	w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Path = filepath.Join(dir, "link") })
	sh(t, dir, "mkdir real/a")
	if got := w.line(w.next()); got != "create link/a/" {
		t.Error(got)
	}
}

func TestWatchStopsWithItsRoot(t *testing.T) {
	for _, tt := range []struct {
		name, script, want string
	}{
		{"deleted", "rmdir root/a; rmdir root", "stopped root_deleted"},
		{"deleted while a process works in it", "cd root; rmdir a; rmdir ../root", "stopped root_deleted"},
		{"moved", "mv root other", "stopped root_moved"},
		{"moved away", "mkdir x; mv root x", "stopped root_moved"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			dir := t.TempDir()
			sh(t, dir, "mkdir -p root/a")
			w := watch(t, c, dir, func(s *guest.WatchSpec) { s.Path = filepath.Join(dir, "root") })
			sh(t, dir, tt.script)
			for {
				line := w.line(w.next())
				if line == tt.want {
					break
				}
				if line != "delete root/a/" {
					t.Fatal(line)
				}
			}
			if _, err := w.stream.Next(); err != io.EOF {
				t.Errorf("after the end: %v", err)
			}
			w.last.Seq-- // a client that missed the end
			w.resume()
			if line := w.line(w.next()); line != tt.want {
				t.Errorf("resumed: %s", line)
			}
		})
	}
}

func TestResumedWatchRepeatsAndLosesNothing(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	w := watch(t, c, dir, nil)
	var got, want []string
	for i := range 20 {
		for j := range 10 {
			name := fmt.Sprintf("%d-%d", i, j)
			if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
				t.Fatal(err)
			}
			want = append(want, "create "+name+"/")
		}
		for range 7 { // the others wait
			got = append(got, w.line(w.next()))
		}
		w.resume()
		if !w.stream.Started.Resumed {
			t.Fatal("not resumed")
		}
	}
	got = append(got, w.settle()...)
	testkit.Diff(t, "events", got, want)
}

func TestUnknownCursorIsReported(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	w := watch(t, c, dir, nil)
	id := w.stream.Started.Watch
	for _, tt := range []struct {
		name   string
		change func(*guest.WatchSpec)
	}{
		{"another watch", func(s *guest.WatchSpec) { s.Since.Watch = "aaaaaaaa" }},
		{"the future", func(s *guest.WatchSpec) { s.Since.Seq = 1000 }},
		{"another directory", func(s *guest.WatchSpec) { s.Path = filepath.Dir(dir) }},
		{"another filter", func(s *guest.WatchSpec) { s.Include = []string{"*"} }},
	} {
		other := watch(t, c, dir, func(s *guest.WatchSpec) {
			s.Since = guest.WatchCursor{Watch: id}
			tt.change(s)
		})
		if other.stream.Started.Resumed || other.stream.Started.Watch == id {
			t.Errorf("%s: resumed", tt.name)
		}
		if line := other.line(other.next()); line != "overflow cursor_expired" {
			t.Errorf("%s: %s", tt.name, line)
		}
		other.expect()
		w.settle()
		other.stream.Close()
	}
}

func TestSlowClientLearnsHowMuchItMissed(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	slow, fast := watch(t, c, dir, nil), watch(t, c, dir, nil)
	// Long names fill the log and the sockets' buffers soon.
	const files, part = 20_000, 500
	for i := range files {
		if err := os.Symlink("x", filepath.Join(dir, fmt.Sprintf("%06d%s", i, strings.Repeat("x", 240)))); err != nil {
			t.Fatal(err)
		}
		if i%part == part-1 {
			for range part {
				if ev := fast.next(); ev.Type != guest.WatchCreate {
					t.Fatalf("the fast client gets %+v", ev)
				}
			}
		}
	}
	seen, dropped := 0, 0
	for seen+dropped < files {
		switch ev := slow.next(); {
		case ev.Type == guest.WatchCreate:
			seen++
		case ev.Reason == guest.WatchSlowClient:
			dropped += int(ev.Dropped)
		default:
			t.Fatalf("the slow client gets %+v", ev)
		}
	}
	if seen+dropped != files || dropped == 0 {
		t.Errorf("%d were reported, %d reported as lost", seen, dropped)
	}
}

func TestWatchesAreLimited(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	var open []*watched
	for range guest.MaxWatches {
		open = append(open, watch(t, c, dir, nil))
	}
	spec := guest.WatchSpec{Path: dir}
	_, err := c.Watch(t.Context(), spec)
	wantCode(t, err, guest.CodeWatchLimit, "16 watches; close one first")
	// One that is kept for its client makes room.
	open[3].stream.Close()
	var s *guest.WatchStream
	testkit.Eventually(t, "a closed watch makes room", func() bool {
		s, err = c.Watch(t.Context(), spec)
		return err == nil
	})
	s.Close()
}

// queues counts the inotify queues of this process.
func queues(t testing.TB) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.Contains(target, "inotify") {
			n++
		}
	}
	return n
}

func TestWatchWithoutClientsIsForgotten(t *testing.T) {
	c := start(t, (*server.Config).ForgetWatchesSoon)
	before := queues(t)
	w := watch(t, c, t.TempDir(), nil)
	if queues(t) != before+1 {
		t.Fatalf("%d inotify queues, %d before", queues(t), before)
	}
	w.stream.Close()
	testkit.Eventually(t, "its queue is closed", func() bool { return queues(t) == before })
	w.resume()
	if line := w.line(w.next()); line != "overflow cursor_expired" {
		t.Error(line)
	}
}

func TestWatchEndsWithTheGuest(t *testing.T) {
	before := queues(t)
	c, end := serve(t, nil)
	w := watch(t, c, t.TempDir(), nil)
	end()
	if _, err := w.stream.Next(); !errors.Is(err, guest.ErrLost) {
		t.Errorf("got %v", err)
	}
	if n := queues(t); n != before {
		t.Errorf("%d inotify queues, %d before", n, before)
	}
}

// Clients disconnect at every point, and others are not affected.
func TestWatchesOfClientsThatDisconnect(t *testing.T) {
	c := start(t, (*server.Config).ForgetWatchesSoon)
	before := queues(t)
	dir := t.TempDir()
	for i := range 200 {
		if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i), "x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	w := watch(t, c, dir, nil)
	for i := range 60 {
		ctx, cancel := context.WithCancel(t.Context())
		stop := time.AfterFunc(time.Duration(i)*100*time.Microsecond, cancel)
		if s, err := c.Watch(ctx, guest.WatchSpec{Path: dir, Recursive: true}); err == nil {
			go func() {
				os.Mkdir(filepath.Join(dir, fmt.Sprint("new", i)), 0o755)
			}()
			for err == nil {
				_, err = s.Next()
			}
			s.Close()
		} // else it was canceled, or the guest has not noticed earlier ends yet
		stop.Stop()
		cancel()
	}
	w.settle()
	w.stream.Close()
	testkit.Eventually(t, "all queues are closed", func() bool { return queues(t) == before })
}

func TestWatchRefusals(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	for _, tt := range []struct {
		name       string
		spec       guest.WatchSpec
		code, hint string
	}{
		{"no path", guest.WatchSpec{}, guest.CodeInvalid, "path is empty"},
		{"missing", guest.WatchSpec{Path: dir + "/missing"}, guest.CodeNotFound, "missing"},
		{"below a file", guest.WatchSpec{Path: dir + "/file/x"}, guest.CodeNotDirectory, "file"},
		{"loop", guest.WatchSpec{Path: dir + "/loop"}, guest.CodeInvalid, "loop"},
		{"pattern", guest.WatchSpec{Path: dir, Include: []string{"["}}, guest.CodeInvalid, "incomplete"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sh(t, dir, "echo > file; ln -sf loop loop")
			_, err := c.Watch(t.Context(), tt.spec)
			wantCode(t, err, tt.code, tt.hint)
		})
	}
}

// A path longer than PATH_MAX cannot be watched, even by root.
func TestUnreadableDirectoriesAreReported(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	before := watch(t, c, dir, nil)
	deep := "i=0; while [ $i -lt 20 ]; do mkdir " + strings.Repeat("d", 250) + "; cd -P " + strings.Repeat("d", 250) + "; i=$((i+1)); done"
	sh(t, dir, deep)
	t.Cleanup(func() { exec.Command("rm", "-rf", dir).Run() })
	lines := before.settle()
	if n := len(slices.DeleteFunc(lines, func(line string) bool { return !strings.HasSuffix(line, "path_unreadable") })); n != 1 {
		t.Errorf("%d directories are reported as unreadable", n)
	}
	after := watch(t, c, dir, nil)
	if after.stream.Started.Unreadable != 1 {
		t.Errorf("got %+v", after.stream.Started)
	}
	after.expect()
}

// overflowed returns a watch of a directory in which the script makes more changes than the
// kernel's queue of $QUEUE events holds.
func overflowed(t *testing.T, dir, script string) *watched {
	t.Helper()
	var queue int
	if _, err := fmt.Sscan(mustRead(t, "/proc/sys/fs/inotify/max_queued_events"), &queue); err != nil {
		t.Fatal(err)
	}
	srv, err := server.New(server.Config{RunDir: t.TempDir(), LogDir: t.TempDir(), AnyPeer: true})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { srv.Serve(ctx) })
	t.Cleanup(serving.Wait)
	t.Cleanup(cancel)
	c := guest.NewClient(srv.Socket())
	t.Cleanup(func() { c.Close() })
	w := watch(t, c, dir, nil)
	proceed := srv.HoldWatches()
	sh(t, dir, fmt.Sprintf("QUEUE=%d; %s", queue, script))
	proceed()
	return w
}

func TestLossInTheQueueIsReportedAndTheWatchGoesOn(t *testing.T) {
	dir := t.TempDir()
	sh(t, dir, "mkdir -p a/x b")
	w := overflowed(t, dir, "cd b; seq $QUEUE | xargs touch; cd ..; rm -r b; mv a c; mkdir -p new/deep")
	for w.line(w.next()) != "overflow queue_full" {
	}
	// Whatever happened meanwhile, all directories are watched where they are.
	sh(t, dir, "mkdir c/x/1 new/deep/2; mv c d; mkdir d/x/3")
	var got []string
	for _, line := range w.settle() {
		if strings.ContainsAny(line, "0123456789") || strings.HasPrefix(line, "move") {
			got = append(got, line)
		}
	}
	testkit.Diff(t, "events", got, []string{"create c/x/1/", "create new/deep/2/", "move c d/", "create d/x/3/"})
}

// It must not end silently: the client would believe that nothing changes.
func TestWatchThatCannotVisitItsRootAgainStops(t *testing.T) {
	dir := t.TempDir()
	sh(t, dir, "mkdir -p above/between/root")
	// No directory can be opened below a link to itself.
	w := overflowed(t, filepath.Join(dir, "above/between/root"), "seq $QUEUE | xargs touch; touch one more; mv ../../../above ../../../moved; ln -s above ../../../above")
	for {
		if ev := w.next(); ev.Type == guest.WatchStopped {
			if ev.Reason != guest.WatchRootUnreadable {
				t.Errorf("stopped: %s", ev.Reason)
			}
			break
		}
	}
}
