package gitignore

import (
	"bytes"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// tree has the paths of the tests. Folders end with a slash.
var tree = []string{
	"a", "b", "a.log", "keep.log", "with space", "with space ", "#file", "!file", "x*y", "xzy", "{a,b}", "a]b", "a-b", "back\\slash",
	"build/", "build/out", "build/keep/", "build/keep/file", "src/", "src/build/", "src/build/out", "src/a.log", "src/deep/", "src/deep/a", "src/deep/a.log", "src/deep/er/", "src/deep/er/a",
	"doc/", "doc/a.txt", "doc/sub/", "doc/sub/a.txt", "foo/", "foo/bar/", "foo/bar/baz", "foo/x/", "foo/x/bar/", "foo/x/bar/baz", ".env", ".cache/", ".cache/x",
}

// files are .gitignore files.
var files = []string{
	"*.log\n!keep.log\n", "build/\n", "/build/\n", "build\n!build/keep\n", "build/*\n!build/keep\n", "src/deep\n", "deep/er\n", "**/deep\n", "src/**\n", "src/**/a\n", "**/bar/baz\n", "foo/**/baz\n", "foo/*/baz\n",
	"doc/*.txt\n", "doc/**/*.txt\n", "*\n!*/\n!a\n", "*\n", "**\n", "/*\n!/src\n", "/**\n", "**/\n", "with space\n", "with space \n", "with space\\ \n", "\\#file\n", "\\!file\n", "# comment\n\n", "x\\*y\n", "x*y\n", "x**y\n",
	"{a,b}\n", "[ab]\n", "[!a]\n", "[^a].log\n", "a[]]b\n", "a[!]]b\n", "a[-]b\n", "a[a-]b\n", "[]\n", "[a\n", "a\\\n", "?\n", "??\n", "back\\\\slash\n", "!a\n", "a\n!a\na\n", "a\r\nb\r\n", "\ufeffa\n", "/\n", "//a\n", "a//b\n", "./a\n", "../a\n", "src/\n!src/a.log\n",
	".*\n", "*/a\n", "**/a\n", "a/\n", "foo/**\n!foo/bar\n", "foo/**bar/baz\n", "s?c/a.log\n", "src[/]a.log\n", "/src[!x]a.log\n", "/src[+-9]a.log\n", "[!/]\n", "a[!-]b\n", "[+-b]\n", "src\\/a.log\n", "  a\n", "[b-z]\n", "[z-a]\n", "*.l?g\n!src/*.log\n",
}

// git returns the paths that git ignores with a .gitignore file.
func git(t *testing.T, content string) []string {
	t.Helper()
	dir := t.TempDir()
	for _, p := range tree {
		at := filepath.Join(dir, p)
		if strings.HasSuffix(p, "/") {
			testkit.NoError(t, "make a folder", os.MkdirAll(at, 0o755))
			continue
		}
		testkit.NoError(t, "make a folder", os.MkdirAll(filepath.Dir(at), 0o755))
		testkit.NoError(t, "write a file", os.WriteFile(at, nil, 0o644))
	}
	testkit.NoError(t, "write the patterns", os.WriteFile(filepath.Join(dir, ".gitignore"), []byte(content), 0o644))
	run := func(input string, args ...string) []byte {
		cmd := exec.Command("git", args...)
		cmd.Dir, cmd.Stdin = dir, strings.NewReader(input)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		out, err := cmd.Output()
		if err != nil && cmd.ProcessState.ExitCode() != 1 { // 1: none is ignored
			t.Fatalf("git %q: %v", args, err)
		}
		return out
	}
	run("", "init", "--quiet")
	input := "" // names of folders without a slash, which git would match with patterns
	for _, p := range tree {
		input += strings.TrimSuffix(p, "/") + "\x00"
	}
	out := run(input, "check-ignore", "--stdin", "-z", "--no-index")
	ignored := strings.Split(string(bytes.TrimSuffix(out, []byte{0})), "\x00")
	slices.Sort(ignored)
	return slices.DeleteFunc(ignored, func(p string) bool { return p == "" })
}

// ignored returns the paths of tree that the patterns ignore, directly or with a folder.
func ignored(content string) []string {
	patterns := ParseFile([]byte(content))
	ignored := []string{}
	for _, p := range tree {
		clean := strings.TrimSuffix(p, "/")
		for at := clean; at != "."; at = path.Dir(at) {
			if is, _ := patterns.Match(at, at != clean || p != clean); is {
				ignored = append(ignored, clean)
				break
			}
		}
	}
	slices.Sort(ignored)
	return ignored
}

func TestPatternsIgnoreWhatGitIgnores(t *testing.T) {
	for _, content := range files {
		t.Run(strings.ReplaceAll(content, "\n", "|"), func(t *testing.T) {
			t.Parallel()
			testkit.Diff(t, "ignored", ignored(content), append([]string{}, git(t, content)...))
		})
	}
}

func TestInvalidPatternsNameTheReason(t *testing.T) {
	for line, want := range map[string]string{
		"": "is empty", "/": "is empty", "!": "is empty", "  ": "is empty", "# a": "is a comment", "[a": "has a bracket that is not closed", "a\\": "ends with a backslash",
		"[[:digit:]]": "has a named class of characters such as [[:digit:]]", "a/[/]": "has a class of characters with a slash", strings.Repeat("a", MaxPattern+1): "is too long",
	} {
		if _, err := Parse(line); err == nil || err.Error() != want {
			t.Errorf("%.20q: %v, want %s", line, err, want)
		}
	}
}

// A part of the patterns could ignore what the rest includes.
func TestTooLargeFilesHaveNoPatterns(t *testing.T) {
	for name, content := range map[string]string{
		"bytes": strings.Repeat("#"+strings.Repeat(" ", 1022)+"\n", 64) + "a", "patterns": strings.Repeat("a\n", MaxPatterns+1),
	} {
		if got := ParseFile([]byte(content)); got != nil {
			t.Errorf("%s: %d patterns", name, len(got))
		}
	}
	if got := ParseFile([]byte(strings.Repeat("a\n", MaxPatterns))); len(got) != MaxPatterns {
		t.Errorf("%d patterns", len(got))
	}
}

// Each of the matches would take longer than the test if its time were exponential.
func TestPathologicalPatternsEnd(t *testing.T) {
	name := strings.Repeat("a", 255)
	long := strings.Repeat(name+"/", 15) + name
	short := strings.Repeat("a/", 2047) + "a"
	for _, line := range []string{
		strings.Repeat("*a", 500) + "b", strings.Repeat("**/", 300) + "b", strings.Repeat("**/a*", 200) + "/b", strings.Repeat("*a*/", 250) + "b", strings.Repeat("?*", 500) + "b",
		"**/" + strings.Repeat("*a", 500) + "b", strings.Repeat("[!b]*", 200) + "b", strings.Repeat("{a,", 300) + "b", strings.Repeat("{a,a}", 200) + "b",
	} {
		p, err := Parse(line)
		testkit.NoError(t, line[:10], err)
		for _, path := range []string{name, long, short} {
			if ignored, _ := (Patterns{p}).Match(path, true); ignored {
				t.Errorf("%.20q matches", line)
			}
		}
	}
}

func FuzzMatch(f *testing.F) {
	for _, content := range files {
		f.Add([]byte(content), "src/deep/a.log", true)
	}
	f.Fuzz(func(t *testing.T, content []byte, path string, folder bool) {
		patterns := ParseFile(content)
		if ignored, matched := patterns.Match(path, folder); ignored && !matched {
			t.Error("ignored without a match")
		}
	})
}
