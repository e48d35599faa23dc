// Package home finds the folder of the node on this machine.
package home

import (
	"fmt"
	"os"
	"path/filepath"
)

// Variable names the environment variable that overrides the default.
const Variable = "DOZE_HOME"

// Folder is the absolute path of the node's folder: DOZE_HOME, else /var/lib/doze
// for root and ~/.local/share/doze for other users.
func Folder(getenv func(string) string) (string, error) {
	if dir := getenv(Variable); dir != "" {
		return filepath.Abs(dir)
	}
	if os.Geteuid() == 0 {
		return "/var/lib/doze", nil
	}
	user, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("%w; set %s to the node's folder", err, Variable)
	}
	return filepath.Join(user, ".local", "share", "doze"), nil
}
