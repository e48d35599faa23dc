// Command bearer is a policy of the tests: it sets the header Authorization to
// "Bearer " and a secret, whose name is its configuration.
package main

import "unsafe"

func main() {}

//go:wasmimport http_handler get_config
func getConfig(buf unsafe.Pointer, limit uint32) uint32

//go:wasmimport http_handler enable_features
func enableFeatures(features uint32) uint32

//go:wasmimport http_handler set_header_value
func setHeaderValue(kind uint32, name unsafe.Pointer, nameLen uint32, value unsafe.Pointer, valueLen uint32)

//go:wasmimport doze_egress_v1 secret_ref
func secretRef(name unsafe.Pointer, nameLen uint32, buf unsafe.Pointer, limit uint32) int32

var (
	secret        []byte
	authorization = []byte("authorization")
	value         = append(make([]byte, 0, 128), "Bearer "...)
)

func init() {
	secret = make([]byte, 64)
	secret = secret[:getConfig(unsafe.Pointer(&secret[0]), 64)]
	if len(secret) == 0 {
		panic("the configuration has to be the name of a secret")
	}
	enableFeatures(1 << 16) // no responses
}

//go:wasmexport handle_request
func handleRequest() uint64 {
	room := value[:cap(value)]
	n := secretRef(unsafe.Pointer(&secret[0]), uint32(len(secret)), unsafe.Pointer(&room[len(value)]), uint32(len(room)-len(value)))
	if n < 0 {
		panic("unknown secret")
	}
	setHeaderValue(0, unsafe.Pointer(&authorization[0]), uint32(len(authorization)), unsafe.Pointer(&room[0]), uint32(len(value))+uint32(n))
	return 1
}

//go:wasmexport handle_response
func handleResponse(ctx, failed uint32) {}
