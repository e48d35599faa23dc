package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// installGuest copies the guest to a place of the node's own, so that replacing
// the node's binaries never changes what running sandboxes have mounted: they
// keep the old file, and a cold wake mounts the new one.
func installGuest(from, to string) error {
	program, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("reading the guest: %w; build it with `make build`, or name it with `guest` in the Caddyfile", err)
	}
	if have, err := os.ReadFile(to); err == nil && bytes.Equal(have, program) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	part := to + ".part"
	if err := writeInPieces(part, program); err != nil {
		return fmt.Errorf("installing the guest: %w", err)
	}
	return os.Rename(part, to)
}

// piece is how much of the guest is written at once, in bytes. A kernel keeps what
// is written at once together in its page cache, and since Linux 6.18 a process
// that touches a byte of such a folio has all of it mapped: of 5 MB of program an
// idle guest would hold all, and of pieces of 64 KiB it holds the few that it needs.
const piece = 64 << 10

// writeInPieces makes an executable file.
func writeInPieces(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	for part := range slices.Chunk(content, piece) {
		if _, err := f.Write(part); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}
