package jupyter

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Header identifies a message.
type Header struct {
	ID       string `json:"msg_id"`
	Session  string `json:"session"`
	Username string `json:"username"`
	Date     string `json:"date"`
	Type     string `json:"msg_type"`
	Version  string `json:"version"`
}

// Message is a message of the Jupyter protocol, version 5. See
// https://jupyter-client.readthedocs.io/en/stable/messaging.html.
type Message struct {
	Header  Header
	Parent  Header // of the request; empty in a request
	Content json.RawMessage
}

// Types of messages.
const (
	typeKernelInfo      = "kernel_info_request"
	typeKernelInfoReply = "kernel_info_reply"
	typeExecute         = "execute_request"
	typeExecuteReply    = "execute_reply"
	typeInterrupt       = "interrupt_request"
	typeInterruptReply  = "interrupt_reply"
	typeStatus          = "status"
	typeStream          = "stream"
	typeDisplay         = "display_data"
	typeUpdate          = "update_display_data"
	typeResult          = "execute_result"
	typeError           = "error"
	typeClear           = "clear_output"
)

// protocolVersion is the version of the requests; kernels of all 5.x accept it.
const protocolVersion = "5.3"

// delimiter separates the identities of a message from its content.
const delimiter = "<IDS|MSG>"

// maxHeader bounds a header in bytes.
const maxHeader = 4 << 10

// Errors of Decode.
var (
	ErrMalformed = errors.New("malformed message")
	ErrSignature = errors.New("message with a wrong signature")
)

// Signer signs messages with the key of a kernel.
type Signer []byte

func (key Signer) sign(parts [][]byte) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		mac.Write(part)
	}
	return hex.AppendEncode(nil, mac.Sum(nil))
}

// Encode returns the frames of a message after its identities.
func (key Signer) Encode(m Message) ([][]byte, error) {
	parent := []byte("{}")
	header, err := json.Marshal(m.Header)
	if err == nil && m.Parent != (Header{}) {
		parent, err = json.Marshal(m.Parent)
	}
	if err != nil {
		return nil, err
	}
	parts := [][]byte{header, parent, []byte("{}"), m.Content}
	return append([][]byte{[]byte(delimiter), key.sign(parts)}, parts...), nil
}

// Decode returns the message of frames and its identities, which are everything before the
// delimiter. The content is valid as long as the frames. Buffers after it are ignored.
func (key Signer) Decode(frames [][]byte) (m Message, identities [][]byte, err error) {
	i := 0
	for i < len(frames) && string(frames[i]) != delimiter {
		i++
	}
	if len(frames)-i < 6 {
		return m, nil, ErrMalformed
	}
	identities, signature, parts := frames[:i], frames[i+1], frames[i+2:i+6]
	if !hmac.Equal(bytes.ToLower(signature), key.sign(parts)) {
		return m, nil, ErrSignature
	}
	if len(parts[0]) > maxHeader || len(parts[1]) > maxHeader {
		return m, nil, fmt.Errorf("%w: its header is too large", ErrMalformed)
	}
	if err := json.Unmarshal(parts[0], &m.Header); err != nil {
		return m, nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := json.Unmarshal(parts[1], &m.Parent); err != nil {
		return m, nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	m.Content = parts[3]
	return m, identities, nil
}

// NewHeader returns the header of a new message.
func NewHeader(id, session, kind string) Header {
	return Header{ID: id, Session: session, Username: "doze", Date: time.Now().UTC().Format(time.RFC3339Nano), Type: kind, Version: protocolVersion}
}
