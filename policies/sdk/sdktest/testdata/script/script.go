// Package script is a policy for tests. Its configuration is a JSON list of lines such as
// "request set 0 x-name value": when to run a command, the command, and its arguments.
// A command runs at the start, for each request, for each response, or when the upstream
// failed. Commands leave their results as notes.
//
// Arguments are quoted as in Go if they have spaces. In an argument, x*100 stands for 100
// times x, {token} for a reference to the secret token, {token-} for a part of one, {last} for
// the latest result, and {i} for the number of the repetition.
package script

import (
	"encoding/binary"
	"os"
	"strconv"
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

var (
	lines    []string
	buffer   = make([]byte, 64<<10)
	hoard    [][]byte
	last     string // the latest result
	codes    bool   // note whether a function succeeded, not its result
	muted    bool   // leave no notes
	index    int    // of the repetition
	starting bool
	pending  []string // notes of the start, which the first request leaves
)

// Start corresponds to _initialize.
func Start() error {
	lines, pending, starting, codes, last = nil, nil, true, false, ""
	if n := abi.Node().GetConfig(buffer); n > 0 {
		if err := decode.Strict(buffer[:n], &lines); err != nil {
			return err
		}
	}
	run("start")
	starting = false
	return nil
}

// HandleRequest corresponds to handle_request.
func HandleRequest() uint64 {
	for _, text := range pending {
		abi.Node().AuditNote(text)
	}
	pending = nil
	return run("request")
}

// HandleResponse corresponds to handle_response.
func HandleResponse(_, failed uint32) {
	if failed == 1 {
		run("failed")
		return
	}
	run("response")
}

func run(when string) (next uint64) {
	next = abi.Next
	for _, line := range lines {
		word, command := split(line)
		switch {
		case word != when:
		case command == "respond":
			next = 0
		default:
			execute(command)
		}
	}
	return next
}

// split returns the first word of a text, without quotes, and the rest.
func split(text string) (word, rest string) {
	quoted, err := strconv.QuotedPrefix(text)
	if err != nil {
		word, rest, _ = strings.Cut(text, " ")
		return word, rest
	}
	word, _ = strconv.Unquote(quoted)
	return word, strings.TrimPrefix(text[len(quoted):], " ")
}

// Repeat returns the text for which x*100 stands.
func Repeat(text string) string {
	unit, times, _ := strings.Cut(text, "*")
	if n, err := strconv.Atoi(times); err == nil && len(unit) == 1 {
		return strings.Repeat(unit, n)
	}
	return text
}

func expand(text string) string {
	text = Repeat(text)
	before, name, found := strings.Cut(text, "{")
	if !found {
		return text
	}
	name, after, _ := strings.Cut(name, "}")
	var value string
	switch secret, part := strings.CutSuffix(name, "-"); {
	case name == "i":
		value = strconv.Itoa(index)
	case name == "last":
		value = last
	default:
		value = string(buffer[:abi.Node().SecretRef(secret, buffer)])
		if part {
			value = value[:len(value)-1]
		}
	}
	return before + value + expand(after)
}

func note(text string) {
	switch {
	case muted:
	case starting:
		pending = append(pending, text)
	default:
		abi.Node().AuditNote(text)
	}
}

func noteNumber(n int64) { note(strconv.FormatInt(n, 10)) }

// result notes the result of a function that returns the length of what it wrote to
// buffer, or a negative code.
func result(n int32) {
	if n >= 0 {
		last = string(buffer[:n])
	}
	switch {
	case n < 0:
		noteNumber(int64(n))
	case codes:
		note("ok")
	default:
		note(last)
	}
}

func noteList(n uint64) { note(strings.ReplaceAll(string(buffer[:uint32(n)]), "\x00", ",")) }

func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic("invalid number: " + text)
	}
	return n
}

func body(kind uint32) string {
	var all []byte
	for {
		n := abi.Node().ReadBody(kind, buffer)
		all = append(all, buffer[:uint32(n)]...)
		if n&abi.EOF != 0 {
			return string(all)
		}
	}
}

func execute(text string) {
	command, rest := split(text)
	var words []string
	for word, more := "", rest; more != ""; {
		word, more = split(more)
		words = append(words, expand(word))
	}
	count := len(words)
	words = append(words, "", "", "")
	if count == 1 {
		rest = words[0]
	}
	first := func() uint32 { return uint32(number(words[0])) }
	switch command {
	case "codes":
		codes = true
	case "repeat":
		_, again := split(rest)
		for index = range int(number(words[0])) {
			muted = index < int(number(words[0]))-1
			execute(again)
		}
	case "enable":
		abi.Node().EnableFeatures(first())
	case "features":
		noteNumber(int64(abi.Node().EnableFeatures(first())))
	case "print":
		os.Stderr.WriteString(rest + "\n")
	case "log":
		abi.Node().Log(abi.Info, rest)
	case "log-enabled":
		note(words[0] + " " + strconv.FormatBool(abi.Node().LogEnabled(int32(number(words[0])))))
	case "panic":
		panic(rest)
	case "spin":
		for {
		}
	case "hoard":
		for range number(words[0]) {
			hoard = append(hoard, make([]byte, 1<<20))
		}
	case "deny":
		abi.Node().Deny(rest)
	case "note":
		note(rest)
	case "method":
		abi.Node().SetMethod(words[0])
	case "get-method":
		result(int32(abi.Node().GetMethod(buffer)))
	case "uri":
		abi.Node().SetURI(words[0])
	case "get-uri":
		result(int32(abi.Node().GetURI(buffer)))
	case "set":
		abi.Node().SetHeaderValue(first(), words[1], words[2])
	case "add":
		abi.Node().AddHeaderValue(first(), words[1], words[2])
	case "remove":
		abi.Node().RemoveHeader(first(), words[1])
	case "names":
		noteList(abi.Node().GetHeaderNames(first(), buffer))
	case "get":
		noteList(abi.Node().GetHeaderValues(first(), words[1], buffer))
	case "read":
		note(body(first()))
	case "read-bytes":
		result(int32(abi.Node().ReadBody(first(), buffer[:number(words[1])])))
	case "length":
		noteNumber(int64(len(body(first()))))
	case "write":
		abi.Node().WriteBody(first(), []byte(words[1]))
	case "upper":
		abi.Node().WriteBody(first(), []byte(strings.ToUpper(body(first()))))
	case "status":
		abi.Node().SetStatusCode(first())
	case "get-status":
		noteNumber(int64(abi.Node().GetStatusCode()))
	case "ref":
		result(abi.Node().SecretRef(words[0], buffer))
	case "encode":
		result(abi.Node().EncodeRef(first(), words[1], buffer))
	case "hmac":
		var parts []byte
		for _, part := range words[2:max(2, count)] {
			parts = binary.LittleEndian.AppendUint32(parts, uint32(len(part)))
			parts = append(parts, part...)
		}
		result(abi.Node().HMACSHA256(words[0], words[1], parts, buffer))
	case "hmac-packed":
		result(abi.Node().HMACSHA256(words[0], words[1], []byte(words[2]), buffer))
	case "sign":
		result(abi.Node().Sign(words[0], uint32(number(words[1])), []byte(words[2]), buffer))
	case "sandbox":
		result(abi.Node().Sandbox(buffer))
	case "host":
		result(abi.Node().HostName(buffer))
	case "kv-get":
		result(abi.Node().KVGet(words[0], buffer))
	case "kv-set":
		noteNumber(int64(abi.Node().KVSet(words[0], []byte(words[1]), number(words[2]))))
	case "kv-add":
		var sum [8]byte
		if code := abi.Node().KVAdd(words[0], number(words[1]), number(words[2]), &sum); code != 0 {
			noteNumber(int64(code))
		} else {
			noteNumber(int64(binary.LittleEndian.Uint64(sum[:])))
		}
	default:
		panic("unknown command: " + text)
	}
}
