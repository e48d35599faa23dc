package types

import "time"

// Secret is a secret without its value.
type Secret struct {
	Name       string    `json:"name" doc:"Name of the secret" example:"github"`
	Hosts      []string  `json:"hosts" nullable:"false" doc:"Hosts that it can be sent to: names, or *.example.com for all below one" example:"[\"api.github.com\"]"`
	Version    int64     `json:"version" doc:"1 for the first value, and one more for each replacement"`
	CreatedAt  time.Time `json:"created_at" doc:"When the secret was first set"`
	UpdatedAt  time.Time `json:"updated_at" doc:"When the secret was last set"`
	Unreadable bool      `json:"unreadable,omitempty" doc:"Whether the node cannot decrypt the secret, so it must be set again"`
}

// SecretList is the secrets of an owner.
type SecretList struct {
	Secrets []Secret `json:"secrets" nullable:"false" doc:"Secrets in the order of their names"`
}

// SetSecretRequest sets a secret.
type SetSecretRequest struct {
	Value    string   `json:"value" doc:"8 bytes to 64 KiB; the API never returns it"`
	Encoding Encoding `json:"encoding,omitempty" default:"utf-8" doc:"Encoding of value"`
	Hosts    []string `json:"hosts" nullable:"false" doc:"Hosts that it can be sent to: names, or *.example.com for all below one" example:"[\"api.github.com\"]"`
}
