//go:build !race

package api

import (
	"runtime"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
)

// The memory that a body takes is bounded by its size, however deep it is.
func TestMemoryOfADeepBody(t *testing.T) {
	const depth = 5_000
	body := []byte(strings.Repeat(`{"`+strings.Repeat("x", 99)+`":`, depth) + "{}" + strings.Repeat("}", depth))
	s := newServer(t, Limits{})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := s.api.decodeJSON(&huma.Schema{}, body, new(any)); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	// If each level kept all names above it, 1,250 MB.
	if used := after.TotalAlloc - before.TotalAlloc; used > 64<<20 {
		t.Errorf("%d bytes were used for %d", used, len(body))
	}
}
