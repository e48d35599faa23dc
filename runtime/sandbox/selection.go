package sandbox

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/doze-run/doze/runtime/gitignore"
)

// BackupSelection is the part of a disk that a backup contains. The zero value selects the whole disk above the image.
type BackupSelection struct {
	// Paths are absolute paths of files and folders. A backup with paths is partial: it contains the merged files of
	// the disk and the image at these paths, and restoring it replaces the disk at these paths only.
	Paths []string `json:"paths,omitempty"`
	// Excludes are patterns of files and folders to leave out, as in a .gitignore file in the root folder. They do not
	// apply to Paths themselves.
	Excludes []string `json:"excludes,omitempty"`
	// Gitignore leaves out what the .gitignore files in work trees of git ignore.
	Gitignore bool `json:"gitignore,omitempty"`
}

const (
	// Limits of the paths of a backup or a snapshot and of a BackupSelection, lengths in bytes. The object store has the
	// selection of each backup, and a list of an owner's 10,000 backups has them all. The node has the paths of as many
	// snapshots in memory.
	maxPaths     = 100
	maxPath      = 4096
	maxExcludes  = 100
	maxSelection = 32 << 10 // all paths and patterns together
)

// unselectable are the folders that are not on the disk, and cannot contain a mount point.
var unselectable = []string{"/proc", "/sys", "/dev", "/.doze"}

// Partial reports whether the backup contains only a part of the disk.
func (s BackupSelection) Partial() bool { return len(s.Paths) > 0 }

func (s BackupSelection) validate() error {
	if err := validatePaths(s.Paths); err != nil {
		return err
	}
	if err := s.validateExcludes(); err != nil {
		return err
	}
	return checkSelection("paths and excludes have", slices.Concat(s.Paths, s.Excludes))
}

// checkSelection checks the total length of texts.
func checkSelection(have string, texts []string) error {
	total := 0
	for _, text := range texts {
		total += len(text)
	}
	if total > maxSelection {
		return &InvalidError{Field: "paths", Reason: fmt.Sprintf("%s %d bytes", have, total), Want: fmt.Sprintf("at most %d bytes are allowed; name the folders that contain them", maxSelection)}
	}
	return nil
}

// validatePaths checks the paths of a partial backup or snapshot, except their total length.
func validatePaths(paths []string) error {
	if len(paths) > maxPaths {
		return &InvalidError{Field: "paths", Reason: fmt.Sprintf("has %d paths", len(paths)), Want: fmt.Sprintf("at most %d are allowed; name the folders that contain them", maxPaths)}
	}
	for i, p := range paths {
		if reason, want := checkPath(p); reason != "" {
			return &InvalidError{Field: fmt.Sprintf("paths[%d]", i), Reason: fmt.Sprintf("%q %s", clip(p), reason), Want: want}
		}
		for _, other := range paths[:i] {
			if within(p, other) || within(other, p) {
				return &InvalidError{Field: fmt.Sprintf("paths[%d]", i), Reason: fmt.Sprintf("%q and %q overlap", clip(p), clip(other)), Want: "name only the outer one"}
			}
		}
	}
	return nil
}

// MissingPath returns the error for a path that a disk does not have. The reason names the missing entry.
func MissingPath(field, reason string) *InvalidError {
	return &InvalidError{Field: field, Reason: reason, Want: "name files and folders that exist in the sandbox"}
}

// samePaths reports whether two backups or snapshots have the same paths, in any order.
func samePaths(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// checkPath returns what is wrong with a path, and the remedy.
func checkPath(p string) (reason, want string) {
	switch {
	case len(p) > maxPath:
		return fmt.Sprintf("has %d bytes", len(p)), fmt.Sprintf("use at most %d", maxPath)
	case !path.IsAbs(p):
		return "is not absolute", "begin it with a slash, such as /srv/app"
	case p == "/":
		return "is the whole disk", "leave paths out for the whole disk"
	case path.Clean(p) != p:
		return "is not a clean path", fmt.Sprintf("use %q", clip(path.Clean(p)))
	case strings.ContainsRune(p, 0) || !utf8.ValidString(p):
		return "is not text", "use UTF-8 without NUL, or name a folder that contains it"
	}
	for _, folder := range unselectable {
		if within(p, folder) {
			return "is not on the disk", fmt.Sprintf("use a path outside of %s", strings.Join(unselectable, ", "))
		}
	}
	return "", ""
}

// within reports whether a clean path is a folder or in it.
func within(p, folder string) bool {
	return p == folder || strings.HasPrefix(p, folder+"/")
}

func (s BackupSelection) validateExcludes() error {
	if len(s.Excludes) > maxExcludes {
		return &InvalidError{Field: "excludes", Reason: fmt.Sprintf("has %d patterns", len(s.Excludes)), Want: fmt.Sprintf("at most %d are allowed", maxExcludes)}
	}
	for i, line := range s.Excludes {
		reason, want := "", "use the syntax of .gitignore, such as node_modules/ or /var/cache/*"
		switch _, err := gitignore.Parse(line); {
		case len(line) > gitignore.MaxPattern:
			reason, want = fmt.Sprintf("has %d bytes", len(line)), fmt.Sprintf("use at most %d", gitignore.MaxPattern)
		case err != nil:
			reason = err.Error()
		case strings.ContainsAny(line, "\x00\n\r") || !utf8.ValidString(line):
			reason = "is not a line of text"
		}
		if reason != "" {
			return &InvalidError{Field: fmt.Sprintf("excludes[%d]", i), Reason: fmt.Sprintf("%q %s", clip(line), reason), Want: want}
		}
	}
	return nil
}
