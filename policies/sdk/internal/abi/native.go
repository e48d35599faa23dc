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
	GetSourceAddr(buf []byte) uint32
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

func the() Host {
	if current == nil {
		panic("this needs a host: use package sdktest")
	}
	return current
}

func EnableFeatures(features uint32) uint32         { return the().EnableFeatures(features) }
func GetConfig(buf []byte) uint32                   { return the().GetConfig(buf) }
func LogEnabled(level int32) bool                   { return the().LogEnabled(level) }
func Log(level int32, message string)               { the().Log(level, message) }
func GetMethod(buf []byte) uint32                   { return the().GetMethod(buf) }
func SetMethod(method string)                       { the().SetMethod(method) }
func GetURI(buf []byte) uint32                      { return the().GetURI(buf) }
func SetURI(uri string)                             { the().SetURI(uri) }
func GetProtocolVersion(buf []byte) uint32          { return the().GetProtocolVersion(buf) }
func GetSourceAddr(buf []byte) uint32               { return the().GetSourceAddr(buf) }
func GetHeaderNames(kind uint32, buf []byte) uint64 { return the().GetHeaderNames(kind, buf) }
func GetHeaderValues(kind uint32, name string, buf []byte) uint64 {
	return the().GetHeaderValues(kind, name, buf)
}
func SetHeaderValue(kind uint32, name, value string) { the().SetHeaderValue(kind, name, value) }
func AddHeaderValue(kind uint32, name, value string) { the().AddHeaderValue(kind, name, value) }
func RemoveHeader(kind uint32, name string)          { the().RemoveHeader(kind, name) }
func ReadBody(kind uint32, buf []byte) uint64        { return the().ReadBody(kind, buf) }
func WriteBody(kind uint32, body []byte)             { the().WriteBody(kind, body) }
func GetStatusCode() uint32                          { return the().GetStatusCode() }
func SetStatusCode(code uint32)                      { the().SetStatusCode(code) }

func SecretRef(name string, buf []byte) int32 { return the().SecretRef(name, buf) }
func EncodeRef(encoding uint32, text string, buf []byte) int32 {
	return the().EncodeRef(encoding, text, buf)
}
func HMACSHA256(name, prefix string, parts, buf []byte) int32 {
	return the().HMACSHA256(name, prefix, parts, buf)
}
func Sign(name string, algorithm uint32, data, buf []byte) int32 {
	return the().Sign(name, algorithm, data, buf)
}
func Sandbox(buf []byte) int32                        { return the().Sandbox(buf) }
func HostName(buf []byte) int32                       { return the().HostName(buf) }
func Deny(reason string)                              { the().Deny(reason) }
func AuditNote(note string)                           { the().AuditNote(note) }
func Now() int64                                      { return the().Now() }
func KVGet(key string, buf []byte) int32              { return the().KVGet(key, buf) }
func KVSet(key string, value []byte, ttl int64) int32 { return the().KVSet(key, value, ttl) }

// KVAdd writes the counter's new value, little-endian, into out.
func KVAdd(key string, delta, ttl int64, out *[8]byte) int32 {
	return the().KVAdd(key, delta, ttl, out)
}
