package node

import (
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// private has patterns of the entries in the node's folder that other users may not read.
var private = []string{"run", "store", "egress", "caddy", "backups", ".restore", "token", "node*.log*", "node.err"}

// restrict removes all permissions of other users from the node's folder and its private
// entries, which have secrets or describe what sandboxes do. Earlier versions and other
// umasks created them with wider permissions. Failures are logged.
func restrict(home string, log *slog.Logger) {
	paths := []string{home}
	entries, err := os.ReadDir(home)
	if err != nil {
		log.Warn("failed to list the node's folder", "path", home, "error", err)
	}
	for _, entry := range entries {
		isPrivate := func(pattern string) bool { ok, _ := path.Match(pattern, entry.Name()); return ok }
		if slices.ContainsFunc(private, isPrivate) {
			paths = append(paths, filepath.Join(home, entry.Name()))
		}
	}
	for _, path := range paths {
		if err := restrictOne(path); err != nil {
			log.Warn("failed to restrict permissions", "path", path, "error", err, "remedy", "chmod go= "+path)
		}
	}
}

func restrictOne(path string) error {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeSymlink != 0 || info.Mode().Perm()&0o077 == 0 {
		return err
	}
	return os.Chmod(path, info.Mode().Perm()&0o700)
}
