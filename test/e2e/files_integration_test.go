//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// The file system of a container is an overlay, while other tests have the host's.
func TestConditionsHoldInASandbox(t *testing.T) {
	b := commonNode(t).newBox(t)
	ctx := testkit.Context(t)
	write := func(content string, o client.WriteOptions) (types.File, error) {
		return b.node.API.WriteFileIf(ctx, b.id, "/srv/dir/file", o, strings.NewReader(content))
	}
	first, err := write("1", client.WriteOptions{CreateNew: true})
	b.must(err)
	if _, err := write("2", client.WriteOptions{CreateNew: true}); !problem.Has(err, problem.PathExists) {
		t.Errorf("create_new of an existing file: %v", err)
	}
	b.sleep()
	described, err := b.node.API.Stat(ctx, b.id, "/srv/dir/file", client.StatOptions{Digest: types.DigestAlgorithmSHA256})
	b.must(err)
	if described.ETag != first.ETag || described.UID != 0 || described.SHA256 != "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b" {
		t.Errorf("after sleep the file is %+v, and was %+v", described, first)
	}
	b.exec("printf 3 > /srv/dir/file")
	if _, err := write("2", client.WriteOptions{IfMatch: first.ETag}); !problem.Has(err, problem.FileConflict) {
		t.Errorf("the ETag of before a change in the sandbox: %v", err)
	}
	// A file of the image, which moves to the upper layer.
	image, err := b.node.API.Stat(ctx, b.id, "/etc/debian_version", client.StatOptions{})
	b.must(err)
	if _, err := b.node.API.WriteFileIf(ctx, b.id, "/etc/debian_version", client.WriteOptions{IfMatch: image.ETag}, strings.NewReader("x")); err != nil {
		t.Errorf("a file of the image: %v", err)
	}
	for round := range 5 {
		now, err := b.node.API.Stat(ctx, b.id, "/srv/dir/file", client.StatOptions{})
		b.must(err)
		var wins atomic.Int32
		var winner atomic.Value
		var writers sync.WaitGroup
		for i := range 8 {
			writers.Go(func() {
				content := fmt.Sprint(round, " ", i)
				switch _, err := write(content, client.WriteOptions{IfMatch: now.ETag}); {
				case err == nil:
					wins.Add(1)
					winner.Store(content)
				case !problem.Has(err, problem.FileConflict):
					t.Error(err)
				}
			})
		}
		writers.Wait()
		if got := b.exec("cat /srv/dir/file"); wins.Load() != 1 || got != winner.Load() {
			t.Fatalf("round %d: %d writers won, and the file has %q", round, wins.Load(), got)
		}
	}
	if got := b.exec("ls -A /srv/dir"); got != "file" {
		t.Errorf("the directory has %q", got)
	}
}

// A program in the sandbox that replaces directories and files by links, during calls, leads
// neither the node to files of the host nor the guest into doze's own directory.
func TestLinksOfASandboxLeadNowhereElse(t *testing.T) {
	b := commonNode(t).newBox(t)
	secret := filepath.Join(t.TempDir(), "secret")
	b.must(os.WriteFile(secret, []byte("of the host"), 0o644))
	before := b.exec("find /.doze | sort")
	b.exec(`mkdir -p /srv/a && echo inside > /srv/a/file
cat > /srv/swap <<'END'
cd /srv
while :; do
  for to in /.doze/run /proc/1/root/.doze/run /proc/self/cwd "$1"; do
    mv a aside; ln -s "$to" a; rm a; mv aside a
    mv a/file kept; ln -s "$2" a/file; rm a/file; mv kept a/file
  done
done
END
echo`)
	swapper, err := b.node.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{
		Command: types.Command{Argv: []string{"sh", "/srv/swap", filepath.Dir(secret), secret}}, Name: "swap",
	})
	b.must(err)
	ctx := testkit.Context(t)
	expected := []problem.Code{
		problem.PathNotFound, problem.PathNotPermitted, problem.PathNotDirectory, problem.PathIsDirectory, problem.RequestInvalid, problem.FileConflict, problem.PathExists,
	}
	check := func(call string, err error) {
		t.Helper()
		var refused *problem.Problem
		if err == nil || errors.As(err, &refused) && slices.Contains(expected, refused.Code) {
			return
		}
		t.Errorf("%s: %v", call, err)
	}
	for i := range 100 {
		_, err := b.node.API.WriteFileIf(ctx, b.id, "/srv/a/file", client.WriteOptions{CreateNew: i%3 == 1}, strings.NewReader("inside"))
		check("write", err)
		_, err = b.node.API.WriteFile(ctx, b.id, "/srv/a/guest.sock", 0, strings.NewReader("inside"))
		check("write of a socket's name", err)
		file, err := b.node.API.Stat(ctx, b.id, "/srv/a/file", client.StatOptions{Follow: i%2 == 0})
		check("stat", err)
		if file.Size == int64(len("of the host")) && file.Type == types.FileTypeFile {
			t.Errorf("stat: %+v", file)
		}
		status, text, err := b.node.Do(ctx, "GET", "/sandbox/"+b.id+"/files/read?path=/srv/a/file", "", nil)
		if err != nil || strings.Contains(text, "of the host") || status >= 500 {
			t.Errorf("read: %d %s, %v", status, text, err)
		}
		status, text, err = b.node.Do(ctx, "DELETE", "/sandbox/"+b.id+"/files?path=/srv/a/guest.sock", "", nil)
		if err != nil || status >= 500 {
			t.Errorf("delete: %d %s, %v", status, text, err)
		}
	}
	_, err = b.node.API.StopProcess(ctx, b.id, swapper.ID, "")
	b.must(err)
	if after := b.exec("find /.doze | sort"); after != before {
		t.Errorf("doze's own directory was %s and is %s", before, after)
	}
	if got, err := os.ReadFile(secret); err != nil || string(got) != "of the host" {
		t.Errorf("the file of the host is %q, %v", got, err)
	}
}

// Ripgrep and the guest's own search find the same.
func TestSearchFindsTheSameWithAndWithoutRipgrep(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.exec(`mkdir -p /srv/s/sub /srv/s/.git /srv/s/node_modules && cd /srv/s && git init -q . &&
printf 'func Get() {}\r\nget\n' > a.go && printf 'x\nfunc Set() {}' > sub/b.go && printf 'func Get\n' > sub/c.txt && printf 'func Get\n' > .git/d.go &&
printf 'func Get\n' > node_modules/e.go && printf 'func Get\n' > .f.go && printf '*.go\n' > .gitignore && printf '\0func Get\n' > binary.go &&
printf 'caf\351 func Get\n' > latin.go && ln -s / root && ln -s a.go link.go && mkfifo pipe.go && head -c 300000 /dev/zero | tr '\0' x > long.go && printf 'func Get\n' >> long.go`)
	search := func(o client.SearchOptions) string {
		t.Helper()
		found, err := b.node.API.SearchFiles(testkit.Context(t), b.id, "/srv/s", o)
		b.must(err)
		var all []string
		for _, m := range found.Matches {
			all = append(all, fmt.Sprintf("%s:%d:%d:%s", strings.TrimPrefix(m.Path, "/srv/s/"), m.Line, m.Column, m.Text))
		}
		slices.Sort(all)
		return strings.Join(all, "\n") + string(found.Stopped)
	}
	searches := []struct {
		o    client.SearchOptions
		want string
	}{
		{client.SearchOptions{Content: `func (Get|Set)\b`, Name: "*.go"}, "a.go:1:1:func Get() {}\nlatin.go:1:6:caf\uFFFD func Get\nsub/b.go:2:1:func Set() {}"},
		{client.SearchOptions{Content: "GET", IgnoreCase: true, Name: "[ab].go"}, "a.go:1:6:func Get() {}\na.go:2:1:get"},
		{client.SearchOptions{Content: "Get()", Literal: true}, "a.go:1:6:func Get() {}"},
		{client.SearchOptions{Content: "^func Get$", Hidden: true, Exclude: []string{"*.txt", ".git"}}, ".f.go:1:1:func Get\nnode_modules/e.go:1:1:func Get"},
		{client.SearchOptions{Content: "none"}, ""},
	}
	compare := func(with string) {
		t.Helper()
		for _, tt := range searches {
			if got := search(tt.o); got != tt.want {
				t.Errorf("%s: %+v: got\n%s\nwant\n%s", with, tt.o, got, tt.want)
			}
		}
	}
	b.exec("command -v rg")
	b.sleep()
	compare("with ripgrep")
	b.exec("rm $(command -v rg)")
	compare("without ripgrep")
}
