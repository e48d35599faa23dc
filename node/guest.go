package node

import (
	"bytes"
	"errors"
	"fmt"
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
	part := to + ".part"
	if err := writeChunks(part, program); err != nil {
		return fmt.Errorf("install the guest: %w", err)
	}
	return os.Rename(part, to)
}

// chunkSize is how many bytes of the guest one write has. The kernel caches the bytes of
// one write as a single folio, and since Linux 6.18 a process that touches a byte of a
// folio has all of it mapped. With one write, an idle guest would hold all 5 MB of its
// program; with chunks of 64 KiB it holds only the few that it needs.
const chunkSize = 64 << 10

// writeChunks creates an executable file.
func writeChunks(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	for chunk := range slices.Chunk(content, chunkSize) {
		if _, err := f.Write(chunk); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}
