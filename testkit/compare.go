package testkit

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files and generated text instead of comparing them")

// Update reports whether the test binary was started with -update.
func Update() bool { return *update }

// Diff fails the test, without ending it, if got differs from want.
func Diff(t testing.TB, what string, got, want any, opts ...cmp.Option) {
	t.Helper()
	if diff := cmp.Diff(want, got, opts...); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", what, diff)
	}
}

// Golden fails the test, without ending it, if got differs from the content of a
// file. With -update it writes the file.
func Golden(t testing.TB, file string, got []byte) {
	t.Helper()
	if Update() {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; run the test with -update to write it", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got); run the test with -update if the new text is right:\n%s", file, diff)
	}
}

// Generated fails the test, without ending it, if a generated part of a document differs
// from content. The part is between the lines <!-- begin generated: NAME --> and
// <!-- end generated: NAME -->. With -update, which `make docs` passes, it writes the part.
func Generated(t testing.TB, file, name, content string) {
	t.Helper()
	document, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- begin generated: "+name+" -->\n", "<!-- end generated: "+name+" -->"
	before, rest, ok := strings.Cut(string(document), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no lines %q and %q", file, strings.TrimSpace(begin), end)
	}
	if text := before + begin + content + end + after; Update() {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(text, string(document)); diff != "" {
		t.Errorf("%s differs from the code (-code +document); run `make docs`:\n%s", file, diff)
	}
}
