package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/problem"
)

func (a *app) copyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cp SOURCE TARGET",
		Short: "Copy files and folders into a sandbox or out of it",
		Long: `Copy files and folders into a sandbox or out of it. One of SOURCE and TARGET is
SANDBOX:PATH.

A folder is copied as TARGET, or into TARGET if that is an existing folder. With /.
after its name, only its contents are copied. - is a tar stream: SOURCE on standard
input, or TARGET on standard output. A local name with a colon needs ./ before it. A
relative path in a sandbox starts at its working directory, as for doze exec.

Symbolic links that lead out of the folder, devices and sockets are skipped with a
warning.`,
		Example: `  doze cp ./site shop:/workspace
  doze cp ./site/. shop:/workspace
  doze cp shop:/workspace/dist ./
  git archive HEAD | doze cp - shop:/workspace`,
		Args:              wants(2, 2),
		ValidArgsFunction: a.completeCopy,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) (err error) {
			from, to := parseLocation(args[0]), parseLocation(args[1])
			c := &copying{app: a, node: node, progress: newProgress(a.err)}
			if from.local() == to.local() {
				return usage.Errorf("exactly one of SOURCE and TARGET must be in a sandbox, like shop:/workspace")
			}
			for _, p := range []*location{&from, &to} {
				if err := makeAbsolute(ctx, node, p); err != nil {
					return err
				}
			}
			switch {
			case from.path == "-" && from.local() && isTerminal(a.in):
				return fmt.Errorf("- is a tar stream, and standard input is a terminal; pipe one into doze, like this: tar -c . | doze cp - %s", args[1])
			case to.path == "-" && to.local() && isTerminal(a.out):
				return fmt.Errorf("- is a tar stream, and standard output is a terminal; redirect it, like this: doze cp %s - > FILE.tar", args[0])
			case to.path == "-" && to.local() && a.json:
				return usage.Errorf("standard output cannot have both a tar stream and JSON; omit --json")
			case from.local():
				err = c.upload(ctx, from.path, to)
			default:
				err = c.download(ctx, from, to.path)
			}
			c.progress.clear()
			if err != nil {
				return err
			}
			return c.report()
		}),
	}
}

// location is one end of a copy: here, or in a sandbox.
type location struct {
	sandbox string // empty: here
	path    string
}

// parseLocation distinguishes SANDBOX:PATH from a local path. A path with a slash before its
// colon is local.
func parseLocation(text string) location {
	sandbox, inside, ok := strings.Cut(text, ":")
	if !ok || sandbox == "" || strings.ContainsAny(sandbox, `/\.`) {
		return location{path: text}
	}
	return location{sandbox: sandbox, path: inside}
}

// makeAbsolute makes a relative path in a sandbox begin at the working directory, which
// the sandbox knows.
func makeAbsolute(ctx context.Context, node *client.Client, p *location) error {
	if p.local() || strings.HasPrefix(p.path, "/") {
		return nil
	}
	result, err := node.Exec(ctx, p.sandbox, client.ExecRequest{Command: types.Command{Argv: []string{"pwd"}}})
	if err != nil {
		return err
	}
	folder := strings.TrimSuffix(result.Stdout, "\n")
	if result.ExitCode != 0 || !strings.HasPrefix(folder, "/") {
		return fmt.Errorf("the working directory of %s is unknown; give an absolute path, like %s:/%s", p.sandbox, p.sandbox, p.path)
	}
	p.path = strings.TrimSuffix(folder, "/") + "/" + p.path // not cleaned: a last / or . has a meaning
	return nil
}

func (p location) local() bool { return p.sandbox == "" }

// contentsOnly reports whether a path means the contents of a folder, not the folder itself.
func contentsOnly(p string) bool {
	return p == "." || p == ".." || strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/..")
}

// copying is one cp command and what it has done so far.
type copying struct {
	app      *app
	node     *client.Client
	progress *progress

	files, bytes atomic.Int64 // a request's body may be read by another goroutine
}

func (c *copying) upload(ctx context.Context, source string, to location) error {
	if source == "-" {
		return c.node.PutArchive(ctx, to.sandbox, path.Clean(to.path), c.counting(c.app.in))
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	there, err := c.stat(ctx, location{to.sandbox, path.Clean(to.path)})
	if err != nil {
		return err
	}
	target := path.Clean(to.path)
	if there == types.FileTypeDirectory && !(info.IsDir() && contentsOnly(source)) {
		full, err := filepath.Abs(source)
		if err != nil {
			return err
		}
		target = path.Join(target, filepath.Base(full))
	}
	switch {
	case info.IsDir() && there == types.FileTypeFile:
		return fmt.Errorf("%s:%s is a file; a folder cannot replace it", to.sandbox, to.path)
	case info.IsDir():
		return c.uploadFolder(ctx, source, location{to.sandbox, target})
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is neither a file nor a folder", source)
	case there == noFile && strings.HasSuffix(to.path, "/"):
		return fmt.Errorf("folder %s:%s does not exist; omit the trailing / to create a file of that name", to.sandbox, to.path)
	}
	return c.uploadFile(ctx, source, info.Mode().Perm(), location{to.sandbox, target})
}

// noFile is the type of a path that does not exist.
const noFile types.FileType = ""

// stat returns the type of the file that a path in a sandbox leads to.
func (c *copying) stat(ctx context.Context, at location) (types.FileType, error) {
	file, err := c.node.Stat(ctx, at.sandbox, at.path, client.StatOptions{Follow: true})
	switch {
	case problem.Has(err, problem.PathNotFound):
		return noFile, nil
	case err != nil:
		return noFile, err
	}
	return file.Type, nil
}

func (c *copying) uploadFile(ctx context.Context, source string, mode fs.FileMode, to location) error {
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	c.files.Add(1)
	mode = max(mode, 0o400) // none at all would mean the usual one, which all may read
	_, err = c.node.WriteFile(ctx, to.sandbox, to.path, mode, c.counting(f))
	return err
}

func (c *copying) uploadFolder(ctx context.Context, source string, to location) error {
	source, err := filepath.EvalSymlinks(source)
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() { // ends when the folder is packed or the other end of the pipe closes
		err := archive.Pack(ctx, w, source, "", archive.PackOptions{ExactTimes: true, Skip: c.skipped, Content: c.content})
		w.CloseWithError(err)
		packed <- err
	}()
	err = c.node.PutArchive(ctx, to.sandbox, to.path, r)
	r.Close()
	if packErr := <-packed; packErr != nil && packErr != io.ErrClosedPipe {
		return packErr
	}
	return err
}

func (c *copying) download(ctx context.Context, from location, target string) error {
	source := path.Clean(from.path)
	if target == "-" {
		tar, err := c.node.GetArchive(ctx, from.sandbox, source)
		if err != nil {
			return err
		}
		defer tar.Close()
		_, err = io.Copy(c.app.out, c.counting(tar))
		return err
	}
	kind, err := c.stat(ctx, location{from.sandbox, source})
	if err != nil {
		return err
	}
	if kind == noFile {
		return fmt.Errorf("%s:%s does not exist", from.sandbox, from.path)
	}
	info, err := os.Stat(target)
	switch {
	case err == nil && info.IsDir() && !(kind == types.FileTypeDirectory && contentsOnly(from.path)):
		base := path.Base(source)
		if base == "/" {
			base = from.sandbox
		}
		target = filepath.Join(target, base)
	case err == nil && !info.IsDir() && kind == types.FileTypeDirectory:
		return fmt.Errorf("%s is a file; a folder cannot replace it", target)
	case err != nil && !os.IsNotExist(err):
		return err
	case err != nil && kind == types.FileTypeFile && strings.HasSuffix(target, "/"):
		return fmt.Errorf("folder %s does not exist; omit the trailing / to create a file of that name", target)
	}
	tar, err := c.node.GetArchive(ctx, from.sandbox, source)
	if err != nil {
		return err
	}
	defer tar.Close()
	return c.unpack(ctx, tar, kind, target)
}

// unpack writes what the sandbox sent to target.
func (c *copying) unpack(ctx context.Context, tar io.Reader, kind types.FileType, target string) error {
	o := archive.UnpackOptions{Skip: c.skipped, Content: c.content, FolderMode: 0o700} // so that their owner can delete them
	if kind == types.FileTypeFile {
		target, o.File = filepath.Split(target)
		target = cmp.Or(target, ".")
	} else if err := os.MkdirAll(target, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return err
	}
	defer root.Close()
	_, err = archive.Unpack(ctx, root, tar, o)
	return err
}

// counting counts and shows what is read from r.
func (c *copying) counting(r io.Reader) io.Reader { return io.TeeReader(r, c) }

func (c *copying) Write(b []byte) (int, error) {
	c.bytes.Add(int64(len(b)))
	c.progress.show(c.summary())
	return len(b), nil
}

// content counts a file and what is read of it.
func (c *copying) content(r io.Reader) io.Reader {
	c.files.Add(1)
	return c.counting(r)
}

// skipped reports that something was not copied.
func (c *copying) skipped(name, reason string) {
	c.progress.wipe()
	fmt.Fprintf(c.app.err, "doze: skipped %s: it %s\n", clean(name), clean(reason))
}

func (c *copying) report() error {
	if c.app.json {
		return c.app.printJSON(map[string]int64{"files": c.files.Load(), "bytes": c.bytes.Load()})
	}
	if isTerminal(c.app.err) {
		fmt.Fprintln(c.app.err, c.summary())
	}
	return nil
}

func (c *copying) summary() string {
	text := "copied " + size(c.bytes.Load())
	if n := c.files.Load(); n > 1 {
		text += fmt.Sprintf(" in %d files", n)
	}
	return text
}
