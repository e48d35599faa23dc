// Package home finds the node on this machine: its folder and its API.
package home

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/version"
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

// Find returns the access to the node that an address, a file with its CA and the variables
// DOZE_API, DOZE_CA and DOZE_TOKEN name, or else to the node on this machine. The token and
// CA of this machine's node are for it alone: they are not used with an address elsewhere,
// nor without TLS, where any program of this machine may listen.
func Find(getenv func(string) string, address, ca string) (Access, error) {
	acc := Access{URL: cmp.Or(address, getenv("DOZE_API")), Token: getenv("DOZE_TOKEN"), CA: cmp.Or(ca, getenv("DOZE_CA"))}
	local, err := Local(getenv)
	if err != nil {
		return Access{}, err
	}
	if u, err := url.Parse(acc.URL); acc.URL == "" || err == nil && client.IsLoopback(u.Hostname()) {
		acc.URL = cmp.Or(acc.URL, local.URL)
		if acc.Token == "" && strings.HasPrefix(strings.ToLower(acc.URL), "http:") {
			return Access{}, fmt.Errorf("the token of this machine's node is not sent to %s, which is not encrypted; set DOZE_TOKEN to send a token there", acc.URL)
		}
		acc.Token = cmp.Or(acc.Token, local.Token)
		if _, err := os.Stat(local.CA); err == nil && acc.CA == "" {
			acc.CA = local.CA
		}
	}
	if acc.Token == "" {
		return Access{}, fmt.Errorf("no token: set DOZE_TOKEN, or DOZE_HOME to the folder of the node on this machine (%s has no readable one)", local.Home)
	}
	return acc, nil
}

// Client returns a client of the node that Find finds.
func Client(getenv func(string) string, address, ca string) (*client.Client, error) {
	acc, err := Find(getenv, address, ca)
	if err != nil {
		return nil, err
	}
	return client.New(client.Config{URL: acc.URL, Token: acc.Token, CAFile: acc.CA, UserAgent: "doze/" + version.String()})
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
