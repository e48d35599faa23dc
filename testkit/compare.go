package testkit

import (
	"flag"
	"os"
	"path/filepath"
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
