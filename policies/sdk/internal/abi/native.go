//go:build !wasip1

package abi

import "sync"

// Host stands in for the node in tests.
type Host interface {
	EnableFeatures(features uint32) uint32
	GetConfig(buf []byte) uint32
	LogEnabled(level int32) bool
	Log(level int32, message string)
	GetMethod(buf []byte) uint32
	SetMethod(method string)
	GetURI(buf []byte) uint32
	SetURI(uri string)
	GetProtocolVersion(buf []byte) uint32
	GetHeaderNames(kind uint32, buf []byte) uint64
	GetHeaderValues(kind uint32, name string, buf []byte) uint64
	SetHeaderValue(kind uint32, name, value string)
	AddHeaderValue(kind uint32, name, value string)
	RemoveHeader(kind uint32, name string)
	ReadBody(kind uint32, buf []byte) uint64
	WriteBody(kind uint32, body []byte)
	GetStatusCode() uint32
	SetStatusCode(code uint32)

	SecretRef(name string, buf []byte) int32
	EncodeRef(encoding uint32, text string, buf []byte) int32
	HMACSHA256(name, prefix string, parts, buf []byte) int32
	Sign(name string, algorithm uint32, data, buf []byte) int32
	Sandbox(buf []byte) int32
	HostName(buf []byte) int32
	Deny(reason string)
	AuditNote(note string)
	Now() int64
	KVGet(key string, buf []byte) int32
	KVSet(key string, value []byte, ttl int64) int32
	// KVAdd writes the counter's new value, little-endian, into out.
	KVAdd(key string, delta, ttl int64, out *[8]byte) int32
}

// Module is the policy of this program. Its fields are the exports of a WebAssembly
// module.
type Module struct {
	Start          func() error // corresponds to _initialize
	HandleRequest  func() uint64
	HandleResponse func(reqCtx, isError uint32)
}

// Loaded is set by sdk.Serve.
var Loaded Module

var (
	// mu serializes the calls of the module: an instance has one call at a time, too.
	mu      sync.Mutex
	current Host
)

// With calls f while h is the host.
func With(h Host, f func()) {
	mu.Lock()
	defer mu.Unlock()
	current = h
	defer func() { current = nil }()
	f()
}

// Node returns the host of the policy.
func Node() Host {
	if current == nil {
		panic("this needs a host: use package sdktest")
	}
	return current
}
