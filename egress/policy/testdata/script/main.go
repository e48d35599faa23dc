// Command script is a policy of the tests: it does what its configuration says,
// line by line. A line begins with when it is to be done: start, request or
// response. What it learns it leaves as notes.
package main

import (
	"encoding/binary"
	"os"
	"strconv"
	"strings"
	"unsafe"
)

func main() {}

type pointer = unsafe.Pointer

//go:wasmimport http_handler enable_features
func enableFeatures(features uint32) uint32

//go:wasmimport http_handler get_config
func getConfig(buf pointer, limit uint32) uint32

//go:wasmimport http_handler log
func log(level int32, text pointer, n uint32)

//go:wasmimport http_handler get_method
func getMethod(buf pointer, limit uint32) uint32

//go:wasmimport http_handler set_method
func setMethod(text pointer, n uint32)

//go:wasmimport http_handler get_uri
func getURI(buf pointer, limit uint32) uint32

//go:wasmimport http_handler set_uri
func setURI(text pointer, n uint32)

//go:wasmimport http_handler get_header_names
func getHeaderNames(kind uint32, buf pointer, limit uint32) uint64

//go:wasmimport http_handler get_header_values
func getHeaderValues(kind uint32, name pointer, n uint32, buf pointer, limit uint32) uint64

//go:wasmimport http_handler set_header_value
func setHeaderValue(kind uint32, name pointer, n uint32, value pointer, vn uint32)

//go:wasmimport http_handler add_header_value
func addHeaderValue(kind uint32, name pointer, n uint32, value pointer, vn uint32)

//go:wasmimport http_handler remove_header
func removeHeader(kind uint32, name pointer, n uint32)

//go:wasmimport http_handler read_body
func readBody(kind uint32, buf pointer, limit uint32) uint64

//go:wasmimport http_handler write_body
func writeBody(kind uint32, body pointer, n uint32)

//go:wasmimport http_handler get_status_code
func getStatusCode() uint32

//go:wasmimport http_handler set_status_code
func setStatusCode(status uint32)

//go:wasmimport doze_egress_v1 secret_ref
func secretRef(name pointer, n uint32, buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 encode_ref
func encodeRef(encoding uint32, text pointer, n uint32, buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 hmac_sha256
func hmacSHA256(name pointer, n uint32, prefix pointer, pn uint32, parts pointer, partsN uint32, buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 sign
func sign(name pointer, n uint32, algorithm uint32, data pointer, dn uint32, buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 sandbox
func sandbox(buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 host
func host(buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 deny
func deny(reason pointer, n uint32)

//go:wasmimport doze_egress_v1 audit_note
func auditNote(note pointer, n uint32)

//go:wasmimport doze_egress_v1 now
func now() int64

//go:wasmimport doze_egress_v1 kv_get
func kvGet(key pointer, n uint32, buf pointer, limit uint32) int32

//go:wasmimport doze_egress_v1 kv_set
func kvSet(key pointer, n uint32, value pointer, vn uint32, ttl int64) int32

//go:wasmimport doze_egress_v1 kv_add
func kvAdd(key pointer, n uint32, delta int64, ttl int64, out pointer) int32

var (
	lines  []string
	buffer = make([]byte, 64<<10)
	hoard  [][]byte
)

func in(s string) (pointer, uint32) { return pointer(unsafe.StringData(s)), uint32(len(s)) }

func out() (pointer, uint32) { return pointer(&buffer[0]), uint32(len(buffer)) }

func note(s string) { auditNote(in(s)) }

func init() {
	lines = strings.Split(string(buffer[:getConfig(out())]), "\n")
	run("start")
}

//go:wasmexport handle_request
func handleRequest() uint64 { return run("request") }

//go:wasmexport handle_response
func handleResponse(ctx, failed uint32) {
	if failed == 1 {
		run("failed")
		return
	}
	run("response")
}

// result of a function that returns a length or a negative code.
func result(n int32) {
	if n < 0 {
		note(strconv.Itoa(int(n)))
		return
	}
	note(string(buffer[:n]))
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic("no number: " + s)
	}
	return n
}

func body(kind uint32) string {
	var all []byte
	for {
		p, n := out()
		r := readBody(kind, p, n)
		all = append(all, buffer[:uint32(r)]...)
		if r>>32 == 1 {
			return string(all)
		}
	}
}

func run(when string) uint64 {
	next := uint64(1)
	for _, line := range lines {
		word := strings.Split(line, " ")
		if word[0] != when {
			continue
		}
		word = append(word[1:], "", "", "", "")
		rest := strings.TrimPrefix(line, when+" "+word[0]+" ")
		switch word[0] {
		case "enable":
			enableFeatures(uint32(number(word[1])))
		case "print":
			os.Stderr.WriteString(rest + "\n")
		case "log":
			p, n := in(rest)
			log(0, p, n)
		case "panic":
			panic(rest)
		case "spin":
			for {
			}
		case "hoard":
			for range number(word[1]) {
				hoard = append(hoard, make([]byte, 1<<20))
			}
		case "respond":
			next = 0
		case "deny":
			deny(in(rest))
		case "note":
			note(rest)
		case "method":
			setMethod(in(word[1]))
		case "get-method":
			note(string(buffer[:getMethod(out())]))
		case "uri":
			setURI(in(word[1]))
		case "get-uri":
			note(string(buffer[:getURI(out())]))
		case "set", "add":
			name, n := in(word[2])
			value, vn := in(word[3])
			if word[0] == "set" {
				setHeaderValue(uint32(number(word[1])), name, n, value, vn)
			} else {
				addHeaderValue(uint32(number(word[1])), name, n, value, vn)
			}
		case "remove":
			name, n := in(word[2])
			removeHeader(uint32(number(word[1])), name, n)
		case "names":
			p, n := out()
			r := getHeaderNames(uint32(number(word[1])), p, n)
			note(strings.ReplaceAll(string(buffer[:uint32(r)]), "\x00", ","))
		case "get":
			name, nn := in(word[2])
			p, n := out()
			r := getHeaderValues(uint32(number(word[1])), name, nn, p, n)
			note(strings.ReplaceAll(string(buffer[:uint32(r)]), "\x00", ","))
		case "read":
			note(body(uint32(number(word[1]))))
		case "length":
			note(strconv.Itoa(len(body(uint32(number(word[1]))))))
		case "write":
			p, n := in(word[2])
			writeBody(uint32(number(word[1])), p, n)
		case "upper":
			s := strings.ToUpper(body(uint32(number(word[1]))))
			p, n := in(s)
			writeBody(uint32(number(word[1])), p, n)
		case "status":
			setStatusCode(uint32(number(word[1])))
		case "get-status":
			note(strconv.Itoa(int(getStatusCode())))
		case "ref":
			name, nn := in(word[1])
			p, n := out()
			result(secretRef(name, nn, p, n))
		case "encode":
			text, tn := in(word[2])
			p, n := out()
			result(encodeRef(uint32(number(word[1])), text, tn, p, n))
		case "hmac":
			var parts []byte
			for _, part := range word[3:] {
				if part != "" {
					parts = binary.LittleEndian.AppendUint32(parts, uint32(len(part)))
					parts = append(parts, part...)
				}
			}
			name, nn := in(word[1])
			prefix, pn := in(word[2])
			p, n := out()
			result(hmacSHA256(name, nn, prefix, pn, pointer(unsafe.SliceData(parts)), uint32(len(parts)), p, n))
		case "sign":
			name, nn := in(word[1])
			data, dn := in(word[3])
			p, n := out()
			result(sign(name, nn, uint32(number(word[2])), data, dn, p, n))
		case "sandbox":
			result(sandbox(out()))
		case "host":
			result(host(out()))
		case "now":
			note(strconv.FormatInt(now(), 10))
		case "kv-get":
			key, kn := in(word[1])
			p, n := out()
			result(kvGet(key, kn, p, n))
		case "kv-set":
			key, kn := in(word[1])
			value, vn := in(word[2])
			note(strconv.Itoa(int(kvSet(key, kn, value, vn, number(word[3])))))
		case "kv-add":
			key, kn := in(word[1])
			var sum int64
			if code := kvAdd(key, kn, number(word[2]), number(word[3]), pointer(&sum)); code != 0 {
				note(strconv.Itoa(int(code)))
			} else {
				note(strconv.FormatInt(sum, 10))
			}
		default:
			panic("no command: " + line)
		}
	}
	return next
}
