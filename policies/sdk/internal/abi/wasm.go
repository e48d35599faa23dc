//go:build wasip1

package abi

import "unsafe"

// The names and signatures are defined by
// https://github.com/http-wasm/http-wasm-abi. Hosts read and write only during
// the call, so that nothing escapes.

//go:wasmimport http_handler enable_features
//go:noescape
func enableFeatures(features uint32) uint32

//go:wasmimport http_handler get_config
//go:noescape
func getConfig(buf unsafe.Pointer, limit uint32) uint32

//go:wasmimport http_handler log_enabled
//go:noescape
func logEnabled(level int32) uint32

//go:wasmimport http_handler log
//go:noescape
func log(level int32, message string)

//go:wasmimport http_handler get_method
//go:noescape
func getMethod(buf unsafe.Pointer, limit uint32) uint32

//go:wasmimport http_handler set_method
//go:noescape
func setMethod(method string)

//go:wasmimport http_handler get_uri
//go:noescape
func getURI(buf unsafe.Pointer, limit uint32) uint32

//go:wasmimport http_handler set_uri
//go:noescape
func setURI(uri string)

//go:wasmimport http_handler get_protocol_version
//go:noescape
func getProtocolVersion(buf unsafe.Pointer, limit uint32) uint32

//go:wasmimport http_handler get_header_names
//go:noescape
func getHeaderNames(kind uint32, buf unsafe.Pointer, limit uint32) uint64

//go:wasmimport http_handler get_header_values
//go:noescape
func getHeaderValues(kind uint32, name string, buf unsafe.Pointer, limit uint32) uint64

//go:wasmimport http_handler set_header_value
//go:noescape
func setHeaderValue(kind uint32, name, value string)

//go:wasmimport http_handler add_header_value
//go:noescape
func addHeaderValue(kind uint32, name, value string)

//go:wasmimport http_handler remove_header
//go:noescape
func removeHeader(kind uint32, name string)

//go:wasmimport http_handler read_body
//go:noescape
func readBody(kind uint32, buf unsafe.Pointer, limit uint32) uint64

//go:wasmimport http_handler write_body
//go:noescape
func writeBody(kind uint32, body unsafe.Pointer, length uint32)

//go:wasmimport http_handler get_status_code
//go:noescape
func getStatusCode() uint32

//go:wasmimport http_handler set_status_code
//go:noescape
func setStatusCode(code uint32)

//go:wasmimport doze_egress_v1 secret_ref
//go:noescape
func secretRef(name string, buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 encode_ref
//go:noescape
func encodeRef(encoding uint32, text string, buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 hmac_sha256
//go:noescape
func hmacSHA256(name, prefix string, parts unsafe.Pointer, partsLen uint32, buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 sign
//go:noescape
func sign(name string, algorithm uint32, data unsafe.Pointer, dataLen uint32, buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 sandbox
//go:noescape
func sandbox(buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 host
//go:noescape
func host(buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 deny
//go:noescape
func deny(reason string)

//go:wasmimport doze_egress_v1 audit_note
//go:noescape
func auditNote(note string)

//go:wasmimport doze_egress_v1 now
//go:noescape
func now() int64

//go:wasmimport doze_egress_v1 kv_get
//go:noescape
func kvGet(key string, buf unsafe.Pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 kv_set
//go:noescape
func kvSet(key string, value unsafe.Pointer, valueLen uint32, ttl int64) int32

//go:wasmimport doze_egress_v1 kv_add
//go:noescape
func kvAdd(key string, delta, ttl int64, out unsafe.Pointer) int32

// node is the host of the module.
type node struct{}

// Node returns the host of the policy.
func Node() node { return node{} }

func at(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
func size(b []byte) uint32       { return uint32(len(b)) }

func (node) EnableFeatures(features uint32) uint32 { return enableFeatures(features) }
func (node) GetConfig(buf []byte) uint32           { return getConfig(at(buf), size(buf)) }
func (node) LogEnabled(level int32) bool           { return logEnabled(level) == 1 }
func (node) Log(level int32, message string)       { log(level, message) }
func (node) GetMethod(buf []byte) uint32           { return getMethod(at(buf), size(buf)) }
func (node) SetMethod(method string)               { setMethod(method) }
func (node) GetURI(buf []byte) uint32              { return getURI(at(buf), size(buf)) }
func (node) SetURI(uri string)                     { setURI(uri) }
func (node) GetProtocolVersion(buf []byte) uint32  { return getProtocolVersion(at(buf), size(buf)) }
func (node) GetHeaderNames(kind uint32, buf []byte) uint64 {
	return getHeaderNames(kind, at(buf), size(buf))
}
func (node) GetHeaderValues(kind uint32, name string, buf []byte) uint64 {
	return getHeaderValues(kind, name, at(buf), size(buf))
}
func (node) SetHeaderValue(kind uint32, name, value string) { setHeaderValue(kind, name, value) }
func (node) AddHeaderValue(kind uint32, name, value string) { addHeaderValue(kind, name, value) }
func (node) RemoveHeader(kind uint32, name string)          { removeHeader(kind, name) }
func (node) ReadBody(kind uint32, buf []byte) uint64        { return readBody(kind, at(buf), size(buf)) }
func (node) WriteBody(kind uint32, body []byte)             { writeBody(kind, at(body), size(body)) }
func (node) GetStatusCode() uint32                          { return getStatusCode() }
func (node) SetStatusCode(code uint32)                      { setStatusCode(code) }

func (node) SecretRef(name string, buf []byte) int32 { return secretRef(name, at(buf), size(buf)) }
func (node) EncodeRef(encoding uint32, text string, buf []byte) int32 {
	return encodeRef(encoding, text, at(buf), size(buf))
}
func (node) HMACSHA256(name, prefix string, parts, buf []byte) int32 {
	return hmacSHA256(name, prefix, at(parts), size(parts), at(buf), size(buf))
}
func (node) Sign(name string, algorithm uint32, data, buf []byte) int32 {
	return sign(name, algorithm, at(data), size(data), at(buf), size(buf))
}
func (node) Sandbox(buf []byte) int32           { return sandbox(at(buf), size(buf)) }
func (node) HostName(buf []byte) int32          { return host(at(buf), size(buf)) }
func (node) Deny(reason string)                 { deny(reason) }
func (node) AuditNote(note string)              { auditNote(note) }
func (node) Now() int64                         { return now() }
func (node) KVGet(key string, buf []byte) int32 { return kvGet(key, at(buf), size(buf)) }
func (node) KVSet(key string, value []byte, ttl int64) int32 {
	return kvSet(key, at(value), size(value), ttl)
}

// KVAdd writes the counter's new value, little-endian, into out.
func (node) KVAdd(key string, delta, ttl int64, out *[8]byte) int32 {
	return kvAdd(key, delta, ttl, unsafe.Pointer(out))
}
