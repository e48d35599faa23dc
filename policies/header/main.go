// Header puts a secret into a header of any name.
package main

import (
	"errors"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	Name   string `json:"name"`
	Prefix string `json:"prefix"`
	Suffix string `json:"suffix"`
}

func init() { sdk.Serve(build) }

func main() {}

// framing are the headers that the node makes itself.
var framing = map[string]bool{
	"host": true, "connection": true, "content-length": true, "transfer-encoding": true,
	"te": true, "trailer": true, "upgrade": true, "keep-alive": true, "http2-settings": true,
	"proxy-connection": true, "proxy-authorization": true, "proxy-authenticate": true,
}

func build(c config) (sdk.Policy, error) {
	switch {
	case c.Name == "":
		return sdk.Policy{}, errors.New(`"name" is missing: the header's`)
	case strings.Trim(c.Name, tokenCharacters) != "":
		return sdk.Policy{}, errors.New(`"name" is not a name of a header: ` + c.Name)
	case framing[strings.ToLower(c.Name)]:
		return sdk.Policy{}, errors.New(`"name" is a header that the node makes itself: ` + c.Name)
	case !isText(c.Prefix) || !isText(c.Suffix):
		return sdk.Policy{}, errors.New(`"prefix" and "suffix" are one line each`)
	}
	return sdk.Policy{Request: func(r *sdk.Request) error {
		value, err := sdk.Secret("value")
		if err != nil {
			return err
		}
		r.Header.Set(c.Name, c.Prefix+value+c.Suffix)
		return nil
	}}, nil
}

// tokenCharacters are the characters of a header's name (RFC 9110, 5.6.2).
const tokenCharacters = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

func isText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}
