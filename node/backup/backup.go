package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
)

// Source is a node that Write backs up.
type Source struct {
	// Home is the node's folder, and Store its open store.
	Home  string
	Store *store.Badger
	// HoldPolicies prevents changes of policies while it calls f, as egress.Egress does.
	// Default: no process changes them.
	HoldPolicies func(f func() error) error
	// Version of doze.
	Version string
	// WithoutKey omits what decrypts secrets or grants access by itself: the sealing key,
	// the API token, and certificates and keys that Caddy has in files.
	WithoutKey bool
}

// Files of a home that a backup can have, in the form of fs.ValidPath.
const (
	tokenFile  = "token"
	keyFile    = "egress/seal.key"
	policies   = "egress/policies"
	caddyFiles = "caddy" // of Caddy's storage file_system
)

var policyFile = regexp.MustCompile(`\A` + policies + `/[0-9a-f]{64}\.wasm\z`)

// isFile reports whether a backup can have a file of that name.
func isFile(name string) bool {
	if !fs.ValidPath(name) || strings.ContainsRune(name, 0) {
		return false
	}
	return name == tokenFile || name == keyFile || policyFile.MatchString(name) || strings.HasPrefix(name, caddyFiles+"/")
}

// Write writes a backup of the data that the node has at this moment. The node continues to
// work meanwhile. If Write fails, the bytes that it has written are not a complete backup.
func Write(ctx context.Context, w io.Writer, src Source) error {
	var policies openFiles
	defer func() { policies.close() }()
	var export *store.Export
	hold := src.HoldPolicies
	if hold == nil {
		hold = func(f func() error) error { return f() }
	}
	// Each policy has a document in the store and a file, so both are of the same moment. An
	// open file can be read even after it was removed.
	err := hold(func() (err error) {
		if policies, err = openPolicies(src.Home); err != nil {
			return err
		}
		export, err = src.Store.BeginExport(ctx)
		return err
	})
	if err != nil {
		return err
	}
	defer export.Close()
	files, err := src.smallFiles()
	if err != nil {
		return err
	}
	_, hasKey := files[keyFile]
	out, err := newWriter(w, Header{
		Schema: Schema, Version: src.Version, Node: src.Store.NodeID(), Created: time.Now().UTC().Truncate(time.Second),
		Commits: export.Commits(), SealingKey: hasKey,
	})
	if err != nil {
		return err
	}
	if err := export.Entries(ctx, out.entry); err != nil {
		return err
	}
	names := make([]string, 0, len(policies)+len(files))
	for name := range policies {
		names = append(names, name)
	}
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if f, ok := policies[name]; ok {
			err = out.openFile(name, f)
		} else {
			err = out.file(name, int64(len(files[name])), strings.NewReader(files[name]))
		}
		if err != nil {
			return err
		}
	}
	return out.writeEnd()
}

func (w *writer) openFile(name string, f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return w.file(name, info.Size(), f)
}

// openFiles are open files by name.
type openFiles map[string]*os.File

func (o openFiles) close() {
	for _, f := range o {
		f.Close()
	}
}

// openPolicies opens the modules of all policies. After an error the caller closes those that
// were opened.
func openPolicies(home string) (openFiles, error) {
	open := openFiles{}
	dir := filepath.Join(home, filepath.FromSlash(policies))
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return open, err
	}
	for _, entry := range entries {
		name := path.Join(policies, entry.Name())
		if !entry.Type().IsRegular() || !isFile(name) {
			continue
		}
		f, err := os.Open(filepath.Join(dir, entry.Name()))
		if err != nil {
			return open, err
		}
		open[name] = f
	}
	return open, nil
}

// smallFiles returns the contents of all other files by name.
func (src Source) smallFiles() (map[string]string, error) {
	files := map[string]string{}
	if src.WithoutKey {
		return files, nil
	}
	for _, name := range []string{tokenFile, keyFile} {
		content, err := readSmall(filepath.Join(src.Home, filepath.FromSlash(name)))
		if errors.Is(err, fs.ErrNotExist) {
			continue // in another place: see node.Config.TokenFile and seal.Open
		}
		if err != nil {
			return nil, err
		}
		files[name] = content
	}
	return files, src.addCaddyFiles(files)
}

// addCaddyFiles adds the files of Caddy's storage file_system in the home. Caddy may change
// and remove them meanwhile, each by itself.
func (src Source) addCaddyFiles(files map[string]string) error {
	root := filepath.Join(src.Home, caddyFiles)
	return filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(src.Home, file)
		if err != nil {
			return err
		}
		name := filepath.ToSlash(relative)
		switch {
		case name == caddyFiles+"/locks":
			return fs.SkipDir
		case !entry.Type().IsRegular() || !isFile(name):
			return nil
		}
		content, err := readSmall(file)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, errLarge): // or not one of Caddy's
			return nil
		case err != nil:
			return err
		}
		files[name] = content
		return nil
	})
}

// maxSmall is more than the size of any key, token and certificate, in bytes.
const maxSmall = 1 << 20

var errLarge = errors.New("the file is too large")

func readSmall(file string) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxSmall+1))
	if err == nil && len(content) > maxSmall {
		err = fmt.Errorf("%s: %w", file, errLarge)
	}
	return string(content), err
}

// WriteStopped writes a backup of a node that does not run. It opens its store, so another
// process that has it open is store.ErrInUse (wrapped).
func WriteStopped(ctx context.Context, w io.Writer, src Source) (err error) {
	if src.Store, err = openStopped(src.Home); err != nil {
		return err
	}
	return errors.Join(Write(ctx, w, src), src.Store.Close())
}

// openStopped opens the store of an existing node.
func openStopped(home string) (*store.Badger, error) {
	id, err := node.ReadNodeID(home)
	if err != nil {
		return nil, err
	}
	if id == "" {
		return nil, fmt.Errorf("%s has no data of a node", home)
	}
	return store.OpenOf(id, node.StoreDir(home), nil)
}
