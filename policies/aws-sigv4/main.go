// Aws-sigv4 signs requests to AWS, and to services with its signature version 4.
//
// https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
package main

import (
	"errors"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// AccessKeyID may be omitted if the rule has the secret access_key_id.
	AccessKeyID string `json:"access_key_id"`
	// SessionToken of temporary credentials. It is signed, so the policy has to see it;
	// without the key it is worthless.
	SessionToken string `json:"session_token"`
	Region       string `json:"region"`
	Service      string `json:"service"`
	// Payload is "hash", which buffers bodies to hash them, or "unsigned", which
	// only S3 knows. A hash of the body that the client sends is used before both.
	Payload string `json:"payload"`
}

func init() { sdk.Serve(build) }

func main() {}

const (
	payloadHash     = "hash"
	payloadUnsigned = "unsigned"
)

func build(c config) (sdk.Policy, error) {
	if c.Payload == "" {
		c.Payload = payloadHash
	}
	switch {
	case !isName(c.Region):
		return sdk.Policy{}, errors.New(`"region" is such as eu-central-1`)
	case !isName(c.Service):
		return sdk.Policy{}, errors.New(`"service" is such as s3, in lower case, as in the credential scope`)
	case c.Payload != payloadHash && c.Payload != payloadUnsigned:
		return sdk.Policy{}, errors.New(`"payload" is "hash" or "unsigned"`)
	case c.Payload == payloadUnsigned && c.Service != "s3":
		return sdk.Policy{}, errors.New(`"payload" is "unsigned" for s3 only: other services refuse that`)
	case strings.ContainsAny(c.AccessKeyID, " ,/=\r\n"):
		return sdk.Policy{}, errors.New(`"access_key_id" is such as AKIAIOSFODNN7EXAMPLE`)
	case strings.ContainsAny(c.SessionToken, " \r\n"):
		return sdk.Policy{}, errors.New(`"session_token" is one word`)
	}
	return sdk.Policy{Request: func(r *sdk.Request) error { return sign(c, r) }}, nil
}

func isName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

func sign(c config, r *sdk.Request) error {
	key := c.AccessKeyID
	if key == "" {
		var err error
		if key, err = sdk.Secret("access_key_id"); err != nil {
			return err
		}
	}
	payload, err := payloadOf(c, r)
	if err != nil {
		return err
	}
	removeSignature(r)
	now := sdk.Now().UTC()
	r.Header.Set("X-Amz-Date", now.Format("20060102T150405Z"))
	if c.SessionToken != "" {
		r.Header.Set("X-Amz-Security-Token", c.SessionToken)
	}
	if c.Service == "s3" {
		r.Header.Set("X-Amz-Content-Sha256", payload)
	}
	headers, err := signedHeaders(r)
	if err != nil {
		return err
	}
	path, query, _ := strings.Cut(r.URI(), "?")
	s := signing{
		method: r.Method(), path: path, query: query, headers: headers, payload: payload,
		time: now, region: c.Region, service: c.Service,
	}
	signature, err := s.signature()
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+key+"/"+s.scope()+
		", SignedHeaders="+s.headerNames()+", Signature="+signature)
	return nil
}
