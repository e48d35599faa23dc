package node

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// installGuest copies the guest into the node's home, so that replacing the node's
// binaries never changes the program that running sandboxes have mounted: they keep the
// old file, and a cold wake mounts the new one.
func installGuest(from, to string) error {
	program, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("read the guest: %w; build it with `make build`, or set its path with `guest` in the Caddyfile", err)
	}
	if have, err := os.ReadFile(to); err == nil && bytes.Equal(have, program) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return writeNew(to, 0o755, program)
}

// chunkSize is how many bytes of a program one write has. The kernel caches the bytes of
// one write as a single folio, and since Linux 6.18 a process that touches a byte of a
// folio has all of it mapped. With one write, an idle guest would hold all 5 MB of its
// program; with chunks of 64 KiB it holds only the few that it needs.
const chunkSize = 64 << 10

// writeNew writes a file atomically: even after a loss of power it is complete or does not
// exist.
func writeNew(path string, mode fs.FileMode, content []byte) error {
	part := path + ".part"
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	for chunk := range slices.Chunk(content, chunkSize) {
		if _, err = f.Write(chunk); err != nil {
			break
		}
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
