// Package home finds the node on this machine: its folder and its API.
package home

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// Access is how to get to the API of a node.
type Access struct {
	URL, Token string
	CA         string // the file with the node's certificate authority

	// Of the node on this machine: its folder and the port of its API.
	Home string
	Port int
}

// defaultPort is the port of a node that `make up` starts.
const defaultPort = "8443"

// maxToken is more than the API accepts.
const maxToken = 4096

// Local returns the access to the node on this machine, whose port DOZE_HTTPS_PORT names.
// The token is empty if this user cannot read the node's.
func Local(getenv func(string) string) (Access, error) {
	folder, err := Folder(getenv)
	if err != nil {
		return Access{}, err
	}
	text := cmp.Or(getenv("DOZE_HTTPS_PORT"), defaultPort)
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return Access{}, fmt.Errorf("DOZE_HTTPS_PORT: invalid port %q; use 1 to 65535", text)
	}
	token, err := readToken(filepath.Join(folder, "token"))
	return Access{
		Home:  folder,
		Port:  int(port),
		URL:   fmt.Sprintf("https://127.0.0.1:%d/api/v1", port),
		Token: token,
		CA:    filepath.Join(folder, "caddy", "pki", "authorities", "local", "root.crt"),
	}, err
}

func readToken(file string) (string, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	token, err := io.ReadAll(io.LimitReader(f, maxToken))
	return strings.TrimSpace(string(token)), err
}
