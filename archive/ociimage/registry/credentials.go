package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
)

// authFile is a file of credentials that podman login or docker login has written.
type authFile struct {
	path   string
	docker bool // docker login has written it
}

// authFiles returns the files with credentials in the order in which Podman reads them. It honors
// REGISTRY_AUTH_FILE, XDG_RUNTIME_DIR, XDG_CONFIG_HOME and DOCKER_CONFIG. See
// https://github.com/containers/image/blob/main/docs/containers-auth.json.5.md.
func authFiles(getenv func(string) string) []authFile {
	if file := getenv("REGISTRY_AUTH_FILE"); file != "" {
		return []authFile{{path: file}}
	}
	var files []authFile
	add := func(docker bool, folder string, elements ...string) {
		files = append(files, authFile{filepath.Join(append([]string{folder}, elements...)...), docker})
	}
	if runtime := getenv("XDG_RUNTIME_DIR"); runtime != "" {
		add(false, runtime, "containers", "auth.json")
	} else if uid := os.Getuid(); uid >= 0 {
		add(false, "/run/containers", fmt.Sprint(uid), "auth.json")
	}
	home := homeFolder(getenv)
	if config := getenv("XDG_CONFIG_HOME"); config != "" {
		add(false, config, "containers", "auth.json")
	} else if home != "" {
		add(false, home, ".config", "containers", "auth.json")
	}
	if config := getenv("DOCKER_CONFIG"); config != "" {
		add(true, config, "config.json")
	} else if home != "" {
		add(true, home, ".docker", "config.json")
	}
	return files
}

// homeFolder returns the user's home folder, or "" if it is unknown.
func homeFolder(getenv func(string) string) string {
	if home := getenv("HOME"); home != "" {
		return home
	}
	return getenv("USERPROFILE") // on Windows
}

// foundCredentials are the credentials for a repository.
type foundCredentials struct {
	auth.Credential
	file string // "" if there are none
}

// findCredentials returns the credentials for a repository from the first file that has some.
func findCredentials(ctx context.Context, files []authFile, r Reference) (foundCredentials, error) {
	for _, file := range files {
		credential, err := file.lookUp(ctx, r)
		if err != nil {
			return foundCredentials{}, fmt.Errorf("read the credentials for %s in %s: %w", r.Registry, file.path, err)
		}
		if credential != auth.EmptyCredential {
			return foundCredentials{credential, file.path}, nil
		}
	}
	return foundCredentials{}, nil
}

func (f authFile) lookUp(ctx context.Context, r Reference) (auth.Credential, error) {
	keys := []string{r.Registry}
	if r.Registry == dockerHub {
		keys = []string{credentials.ServerAddressFromRegistry(r.Registry), dockerHub}
	}
	if !f.docker {
		store, err := credentials.NewFileStore(f.path)
		if err != nil {
			return auth.EmptyCredential, err
		}
		// Podman stores credentials for a namespace, too: podman login registry.example.com/team.
		for key := r.Registry + "/" + r.Repository; key != r.Registry; key = path.Dir(key) {
			if credential, err := store.Get(ctx, key); err != nil || credential != auth.EmptyCredential {
				return credential, err
			}
		}
		if keys, err = f.named(keys); err != nil {
			return auth.EmptyCredential, err
		}
	}
	store, err := credentials.NewStore(f.path, credentials.StoreOptions{})
	if err != nil {
		return auth.EmptyCredential, err
	}
	for _, key := range keys {
		if credential, err := store.Get(ctx, key); err != nil || credential != auth.EmptyCredential {
			return credential, err
		}
	}
	return auth.EmptyCredential, nil
}

// named returns the keys of a registry for which the file has credentials or a helper. For the others, the library would
// take the credentials of a namespace of the registry.
func (f authFile) named(keys []string) ([]string, error) {
	text, err := os.ReadFile(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var config struct {
		Auths       map[string]json.RawMessage `json:"auths"`
		CredHelpers map[string]string          `json:"credHelpers"`
		CredsStore  string                     `json:"credsStore"`
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(keys, func(key string) bool {
		_, ok := config.Auths[key]
		return !ok && config.CredsStore == "" && config.CredHelpers[key] == "" && !hasURL(config.Auths, key)
	}), nil
}

// hasURL reports whether the URL of a registry is a key, as older versions of Docker store it.
func hasURL(auths map[string]json.RawMessage, registry string) bool {
	for key := range auths {
		if u, err := url.Parse(key); err == nil && u.Scheme != "" && u.Host == registry {
			return true
		}
	}
	return false
}

// list returns the paths of files, for an error.
func list(files []authFile) string {
	paths := make([]string, 0, len(files))
	for _, f := range files {
		paths = append(paths, f.path)
	}
	return strings.Join(paths, ", ")
}
