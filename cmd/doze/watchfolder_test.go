package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/doze-run/doze/testkit"
)

func TestChangesAreGrouped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := make(chan fsnotify.Event)
		w := &folderWatch{root: "/p", output: "/p/p.wasm", notify: &fsnotify.Watcher{Events: events, Errors: make(chan error)}}
		groups := make(chan []string)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { // ends with ctx
			defer close(groups)
			for {
				changed, err := w.next(ctx)
				if err != nil {
					return
				}
				groups <- changed
			}
		}()
		send := func(files ...string) {
			for _, file := range files {
				events <- fsnotify.Event{Name: "/p/" + file, Op: fsnotify.Write}
			}
		}
		began := time.Now()
		send("main.go", "p.wasm", ".main.go.swp", "main.go", "a.go", "b.go", "c.go")
		if got := <-groups; !slices.Equal(got, []string{"main.go", "a.go", "b.go"}) || time.Since(began) != quietFor {
			t.Errorf("got %q after %v", got, time.Since(began))
		}
		// A folder that changes all the time is built at intervals.
		began = time.Now()
		var got []string
		for got == nil {
			select {
			case events <- fsnotify.Event{Name: "/p/log", Op: fsnotify.Write}:
				time.Sleep(quietFor / 2)
			case got = <-groups:
			}
		}
		if took := time.Since(began); took < changesFor || took > changesFor+quietFor {
			t.Errorf("got %q after %v", got, took)
		}
		cancel()
		for range groups {
		}
	})
}

func TestWhatIsNotAChange(t *testing.T) {
	w := &folderWatch{root: "/p", output: "/p/p.wasm"}
	for name, want := range map[string]bool{
		"main.go": true, "tests.json": true, "key": true, "go.mod": true, "other.wasm": true, "sub/p.wasm": true, "template.txt": true,
		"p.wasm": false, "p.wasm-go-tmp-umask": false, ".git": false, "main.go~": false, ".main.go.swp": false, "x.swp": false, "4913": false, "#main.go#": false,
		".#main.go": false, "main.go___jb_tmp___": false, "main.go.tmp.123": false, "x.tmp": false, "main.go.bak": false,
	} {
		if got := w.concerns(fsnotify.Event{Name: "/p/" + name, Op: fsnotify.Write}); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if w.concerns(fsnotify.Event{Name: "/p/main.go", Op: fsnotify.Chmod}) {
		t.Error("a mode is a change")
	}
}

func TestFoldersAreFollowed(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"a/b", ".git/objects"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	w, err := watchFolder(root, filepath.Join(root, "p.wasm"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	// until returns when a file is among those that changed.
	until := func(file string) {
		t.Helper()
		for {
			changed, err := w.next(ctx)
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if slices.Contains(changed, file) {
				return
			}
		}
	}
	tree{".git/objects/x": "1", "a/b/c": "1"}.write(t, root)
	until("a/b/c")
	if err := os.MkdirAll(filepath.Join(root, "new/er"), 0o777); err != nil {
		t.Fatal(err)
	}
	until("new")
	tree{"new/er/x": "1"}.write(t, root)
	until("new/er/x")
	if slices.ContainsFunc(w.notify.WatchList(), func(dir string) bool { return strings.Contains(dir, ".git") }) {
		t.Errorf("watched: %q", w.notify.WatchList())
	}
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = w.next(ctx)
	}
	if !strings.Contains(err.Error(), "was removed") {
		t.Error(err)
	}
}

func TestFoldersAreNotWithoutNumber(t *testing.T) {
	root := t.TempDir()
	for i := range maxFolders {
		if err := os.Mkdir(filepath.Join(root, fmt.Sprint(i)), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := watchFolder(root, filepath.Join(root, "p.wasm")); err == nil || !strings.Contains(err.Error(), "more than 1000 folders") {
		t.Errorf("got %v", err)
	}
	if _, err := watchFolder(filepath.Join(root, "none"), "x"); err == nil {
		t.Error("there is nothing to watch")
	}
}
