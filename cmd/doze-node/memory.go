package main

import (
	"context"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
)

func init() {
	caddy.RegisterModule(memoryStorage{})
}

const storageModule = "doze_validate"

// memoryStorage is a storage in which `doze validate` provisions modules. It is lost
// with the process, and is not for nodes.
type memoryStorage struct{}

// CaddyModule returns the Caddy module information.
func (memoryStorage) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.storage." + storageModule, New: func() caddy.Module { return new(memoryStorage) }}
}

// CertMagicStorage implements caddy.StorageConverter.
func (memoryStorage) CertMagicStorage() (certmagic.Storage, error) {
	return &memory{values: map[string][]byte{}, locks: map[string]chan struct{}{}}, nil
}

// memory implements certmagic.Storage.
type memory struct {
	mu     sync.Mutex
	values map[string][]byte
	locks  map[string]chan struct{} // closed when released
}

func (m *memory) Lock(ctx context.Context, name string) error {
	for {
		m.mu.Lock()
		held := m.locks[name]
		if held == nil {
			m.locks[name] = make(chan struct{})
			m.mu.Unlock()
			return nil
		}
		m.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *memory) Unlock(_ context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.locks[name])
	delete(m.locks, name)
	return nil
}

func (m *memory) Store(_ context.Context, key string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values[key] = value
	return nil
}

func (m *memory) Load(_ context.Context, key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	value, ok := m.values[key]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return value, nil
}

func (m *memory) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for other := range m.values {
		if below(other, key) {
			delete(m.values, other)
		}
	}
	return nil
}

func (m *memory) Exists(ctx context.Context, key string) bool {
	_, err := m.Stat(ctx, key)
	return err == nil
}

// List ignores recursive: it returns the keys of values only.
func (m *memory) List(_ context.Context, path string, _ bool) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var keys []string
	for key := range m.values {
		if below(key, path) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

func (m *memory) Stat(_ context.Context, key string) (certmagic.KeyInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if value, ok := m.values[key]; ok {
		return certmagic.KeyInfo{Key: key, Modified: time.Now(), Size: int64(len(value)), IsTerminal: true}, nil
	}
	for other := range m.values {
		if below(other, key) {
			return certmagic.KeyInfo{Key: key}, nil
		}
	}
	return certmagic.KeyInfo{}, fs.ErrNotExist
}

// below reports whether a key is path or lies below it.
func below(key, path string) bool {
	return path == "" || key == path || strings.HasPrefix(key, strings.TrimSuffix(path, "/")+"/")
}

var _ caddy.StorageConverter = (*memoryStorage)(nil)
