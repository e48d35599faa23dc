// Package storetest has stores for tests of other packages.
package storetest

import (
	"testing"

	"github.com/doze-run/doze/runtime/store"
)

// New returns an empty store in memory, which is closed with the test.
func New(t testing.TB) *store.Badger {
	t.Helper()
	s, err := store.OpenInMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}
