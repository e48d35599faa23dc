package certstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/doze-run/doze/internal/durable"
)

// importedName names the document that marks the import as done.
const importedName = "imported"

// maxFile bounds the files that are imported, in bytes. Caddy's have a few KiB.
const maxFile = 512 << 10

// lockFolder is where certmagic.FileStorage has its locks, which are not imported.
const lockFolder = "locks"

// importOnce imports the files of certmagic.FileStorage in cfg.Folder, unless that was done
// before. The files stay, because the configuration that reads them may still be in use, or come
// back. If the import is interrupted, the next Open continues. A file never replaces a value.
func (s *Storage) importOnce(ctx context.Context) error {
	if _, err := s.cfg.Store.Document(ctx, stateKind, importedName); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	count, err := s.importFiles(ctx)
	if err != nil {
		return err
	}
	if count > 0 {
		s.cfg.Log.Warn("imported Caddy's certificates, keys and accounts into the node's store", "files", count, "folder", s.cfg.Folder,
			"remedy", "once the node runs, remove the files, because the keys in them are not encrypted: find "+s.cfg.Folder+" -type f ! -name root.crt -delete")
	}
	return s.cfg.Store.PutDocument(ctx, stateKind, importedName, []byte(time.Now().UTC().Format(time.RFC3339)))
}

// importFiles returns the number of files that it found.
func (s *Storage) importFiles(ctx context.Context) (count int, err error) {
	root, err := filepath.EvalSymlinks(s.cfg.Folder)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	err = filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		key := filepath.ToSlash(relative)
		if entry.IsDir() {
			if key == lockFolder {
				return fs.SkipDir
			}
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() || info.Size() > maxFile || len(key) > maxKey {
			s.cfg.Log.Warn("ignoring file that Caddy has not written", "path", file, "size", info.Size())
			return nil
		}
		if isRoot(key) {
			if _, err := os.Stat(strings.TrimSuffix(file, ".crt") + ".key"); errors.Is(err, fs.ErrNotExist) {
				return nil // one that writeRoot wrote
			}
		}
		count++
		if _, err := s.Stat(ctx, key); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		value, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		return s.put(ctx, key, info.ModTime(), value)
	})
	return count, err
}

// isRoot reports whether a key is the public certificate of one of Caddy's authorities.
func isRoot(key string) bool {
	ok, _ := path.Match("pki/authorities/*/root.crt", key)
	return ok
}

// writeRoots writes the certificates of all authorities as files.
func (s *Storage) writeRoots(ctx context.Context) error {
	keys, err := s.below(ctx, "pki/authorities")
	if err != nil {
		return fmt.Errorf("read Caddy's authorities: %w", err)
	}
	for _, key := range keys {
		if !isRoot(key) {
			continue
		}
		_, value, err := s.get(ctx, key)
		if err != nil {
			return fmt.Errorf("read Caddy's authorities: %w", err)
		}
		s.writeRoot(key, value)
	}
	return nil
}

func (s *Storage) file(key string) string {
	return filepath.Join(s.cfg.Folder, filepath.FromSlash(key))
}

// writeRoot writes the certificate of an authority as a file. Caddy itself does not need it,
// so a failure is logged.
func (s *Storage) writeRoot(key string, value []byte) {
	file := s.file(key)
	if have, err := os.ReadFile(file); err == nil && string(have) == string(value) {
		return
	}
	err := os.MkdirAll(filepath.Dir(file), 0o700)
	if err == nil {
		err = durable.Write(file, value, os.Rename)
	}
	if err != nil {
		s.cfg.Log.Error("failed to write the certificate of an authority to a file", "path", file, "error", err)
	}
}

func (s *Storage) removeRoot(key string) {
	if err := os.Remove(s.file(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Log.Error("failed to remove the certificate of an authority", "path", s.file(key), "error", err)
	}
}
