package sdk

import (
	"bytes"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Header is the header or trailer of a request or response. Names are
// case-insensitive.
type Header struct{ kind uint32 }

// Get returns the first value, or "" if there is none.
func (h Header) Get(name string) string {
	raw, count := h.raw(name)
	if count == 0 {
		return ""
	}
	value, _, _ := bytes.Cut(raw, nul)
	return string(value)
}

// Has reports whether the header exists, even if its value is empty.
func (h Header) Has(name string) bool {
	return uint32(abi.Node().GetHeaderValues(h.kind, name, nil)>>32) > 0
}

// Values returns all values.
func (h Header) Values(name string) []string { return split(h.raw(name)) }

// Names returns the names of all headers, in lower case.
func (h Header) Names() []string {
	return split(sequence(func(buf []byte) uint64 { return abi.Node().GetHeaderNames(h.kind, buf) }))
}

// Set replaces all values with one.
func (h Header) Set(name, value string) { abi.Node().SetHeaderValue(h.kind, name, value) }

// Add adds a value.
func (h Header) Add(name, value string) { abi.Node().AddHeaderValue(h.kind, name, value) }

// Del removes all values.
func (h Header) Del(name string) { abi.Node().RemoveHeader(h.kind, name) }

func (h Header) raw(name string) ([]byte, int) {
	return sequence(func(buf []byte) uint64 { return abi.Node().GetHeaderValues(h.kind, name, buf) })
}

var nul = []byte{0}

// sequence returns the result of get: texts that each end with NUL, and their number.
func sequence(get func([]byte) uint64) (raw []byte, count int) {
	raw = fetch(func(buf []byte) uint32 {
		n := get(buf)
		count = int(n >> 32)
		return uint32(n)
	})
	return raw, count
}

func split(raw []byte, count int) []string {
	texts := make([]string, 0, count)
	for range count {
		text, rest, _ := bytes.Cut(raw, nul)
		texts, raw = append(texts, string(text)), rest
	}
	return texts
}
