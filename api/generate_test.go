package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/problem"
)

// documentVersion is the version of the API. Compatible additions do not change it.
const documentVersion = "1.0"

const (
	schemasPrefix  = "#/components/schemas/"
	examplesPrefix = "#/components/examples/"
)

// tags of operations, in the order in which the document lists them.
var tags = []*huma.Tag{
	{Name: "sandboxes", Description: "Create, list, change and destroy sandboxes."},
	{Name: "lifecycle", Description: "Wake a sandbox, put it to sleep, stop it, archive it, or hold it awake."},
	{Name: "exec", Description: "Run commands in a sandbox and get their output."},
	{Name: "snapshots", Description: "Immutable disks, from which sandboxes are restored and created."},
	{Name: "backups", Description: "Disks of sandboxes in an object store, which outlive the node."},
	{Name: "mounts", Description: "Mount buckets of object stores as folders of sandboxes."},
	{Name: "sessions", Description: "Shells that keep their state from one command to the next."},
	{Name: "contexts", Description: "Interpreters that execute code and retain its state."},
	{Name: "files", Description: "Read, write and list files of a sandbox; pack and unpack whole folders."},
	{Name: "git", Description: "Run the sandbox's own git: clone, inspect, commit and push repositories. Credentials come from egress policies."},
	{Name: "processes", Description: "Start, list and stop background processes of a sandbox; read their logs."},
	{Name: "terminals", Description: "Open terminals in a sandbox, type into them, and list and close them."},
	{Name: "ports", Description: "Expose ports of a sandbox, each at an address of its own."},
	{Name: "events", Description: "Changes of the state of sandboxes."},
	{Name: "egress", Description: "Rules for the network traffic that leaves sandboxes, and the traffic itself."},
	{Name: "secrets", Description: "Secrets that policies add to outgoing requests. Sandboxes never see them."},
	{Name: "policies", Description: "Programs that inspect and change outgoing requests."},
	{Name: "node", Description: "The node itself."},
}

// responseHeaders are the headers that the document describes.
var responseHeaders = map[string]*huma.Header{
	"X-Request-Id": {
		Description: "Identifies the request in the node's log: the X-Request-Id of the request if it has a valid one, else a new one.",
		Schema:      &huma.Schema{Type: huma.TypeString},
	},
	"Location":          {Description: "Path of the new resource.", Schema: &huma.Schema{Type: huma.TypeString, Format: "uri-reference"}},
	"Retry-After":       {Description: "Seconds to wait before the request is sent again.", Schema: &huma.Schema{Type: huma.TypeInteger}},
	problem.HeaderError: {Description: "The problem's code. Responses without a problem do not have it.", Schema: &huma.Schema{Type: huma.TypeString}},
	"ETag":              {Description: "Revision of the resource.", Schema: &huma.Schema{Type: huma.TypeString}},
}

// describe adds what the document says about the API as a whole.
func describe(document *huma.OpenAPI) {
	document.Info = &huma.Info{
		Title:       "doze",
		Version:     documentVersion,
		Description: "Sandboxes that sleep until someone knocks. Errors are problem documents (RFC 9457) with a stable `code`.",
		License:     &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"},
	}
	document.Servers = []*huma.Server{{URL: Prefix}}
	document.Tags = tags
	document.Components.Headers = responseHeaders
	document.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		securityScheme: {Type: "http", Scheme: "bearer", Description: "The node's token."},
		signatureScheme: {Type: "apiKey", In: "query", Name: signedurl.Signature,
			Description: "The signature of a URL that `POST /sandbox/{id}/files/url` or `POST /sandbox/{id}/terminal/url` has returned. It is valid only with the other parameters of that URL."},
	}
}

// document returns the OpenAPI document of all routes, which is committed as
// docs/openapi.json.
//
// Huma describes what the server accepts, and validates requests with its schemas.
// The document promises less about responses, and describes more for people: so it is
// edited as JSON, which leaves huma's schemas as they are.
func (a *API) document() ([]byte, error) {
	describe(a.huma.OpenAPI())
	text, err := json.Marshal(a.huma.OpenAPI())
	if err != nil {
		return nil, fmt.Errorf("encode the OpenAPI document: %w", err)
	}
	d := openAPIDocument{}
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, fmt.Errorf("decode the OpenAPI document: %w", err)
	}
	d.removePatternDescriptions()
	d.addDefaultResponses()
	d.removeUnusedSchemas()
	d.openResponses()
	docs, err := exampleDocs()
	if err != nil {
		return nil, err
	}
	d.describeSchemas(docs)
	d.addBodyExamples(docs)
	d.addParameterExamples()
	d.describeProblems()
	d.describeHeaders()
	var out bytes.Buffer
	enc := json.NewEncoder(&out) // sorts the keys
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(d); err != nil {
		return nil, fmt.Errorf("encode the OpenAPI document: %w", err)
	}
	return out.Bytes(), nil
}

// openAPIDocument is the document as JSON.
type openAPIDocument map[string]any

// field returns the object at a path of keys, and creates it if it is missing.
func field(object map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		next, ok := object[key].(map[string]any)
		if !ok {
			next = map[string]any{}
			object[key] = next
		}
		object = next
	}
	return object
}

func (d openAPIDocument) schemas() map[string]any { return field(d, "components", "schemas") }

// eachOperation calls f with every operation.
func (d openAPIDocument) eachOperation(f func(operation map[string]any)) {
	for _, path := range field(d, "paths") {
		for _, operation := range path.(map[string]any) {
			f(operation.(map[string]any))
		}
	}
}

// eachResponse calls f with every response and its status, which may be "default".
func (d openAPIDocument) eachResponse(f func(status string, response map[string]any)) {
	d.eachOperation(func(operation map[string]any) {
		for status, response := range field(operation, "responses") {
			f(status, response.(map[string]any))
		}
	})
}

// eachObject calls f with value and every object below it.
func eachObject(value any, f func(map[string]any)) {
	switch value := value.(type) {
	case map[string]any:
		f(value)
		for _, below := range value {
			eachObject(below, f)
		}
	case []any:
		for _, below := range value {
			eachObject(below, f)
		}
	}
}

// eachSchema calls f with every object below value, and below the schemas that it refers
// to. It adds the names of those to visited, and skips names that are already in it.
func (d openAPIDocument) eachSchema(value any, visited map[string]bool, f func(map[string]any)) {
	eachObject(value, func(object map[string]any) {
		f(object)
		ref, _ := object["$ref"].(string)
		if name, ok := strings.CutPrefix(ref, schemasPrefix); ok && !visited[name] {
			visited[name] = true
			d.eachSchema(d.schemas()[name], visited, f)
		}
	})
}

// removePatternDescriptions removes huma's own keyword, which is not one of OpenAPI's.
func (d openAPIDocument) removePatternDescriptions() {
	eachObject(map[string]any(d), func(object map[string]any) { delete(object, "patternDescription") })
}

// addDefaultResponses gives every operation a Problem for all other statuses, so that
// clients handle codes which a newer node adds.
func (d openAPIDocument) addDefaultResponses() {
	d.eachOperation(func(operation map[string]any) {
		field(operation, "responses")["default"] = map[string]any{
			"description": "Any other problem",
			"content":     map[string]any{problem.ContentType: map[string]any{"schema": map[string]any{"$ref": schemasPrefix + reflect.TypeFor[problem.Problem]().Name()}}},
		}
	})
}

// removeUnusedSchemas removes what no route refers to, such as huma's own error type.
func (d openAPIDocument) removeUnusedSchemas() {
	used := map[string]bool{}
	d.eachSchema(d["paths"], used, func(map[string]any) {})
	for name := range d.schemas() {
		if !used[name] {
			delete(d.schemas(), name)
		}
	}
}

// openResponses permits unknown fields in everything that a response contains, because
// fields may be added. A schema that requests share with responses is open too; the
// server still refuses unknown fields in requests.
func (d openAPIDocument) openResponses() {
	visited := map[string]bool{}
	d.eachResponse(func(_ string, response map[string]any) {
		d.eachSchema(response, visited, func(object map[string]any) {
			if object["additionalProperties"] == false {
				delete(object, "additionalProperties")
			}
		})
	})
}

// describeHeaders replaces the headers of responses with references to responseHeaders,
// and adds those that every response has.
func (d openAPIDocument) describeHeaders() {
	d.eachResponse(func(_ string, response map[string]any) {
		headers := field(response, "headers")
		headers["X-Request-Id"] = nil
		delete(headers, "Content-Type") // content describes it
		for name := range headers {
			if responseHeaders[name] != nil {
				headers[name] = map[string]any{"$ref": "#/components/headers/" + name}
			}
		}
	})
}

// exampleDocs returns schemaDocs by the name of the schema, with the examples as decoded JSON.
func exampleDocs() (map[string]schemaDoc, error) {
	docs := map[string]schemaDoc{}
	for _, row := range schemaDocs() {
		text, err := json.Marshal(row.example)
		if err != nil {
			return nil, fmt.Errorf("encode the example of %T: %w", row.example, err)
		}
		var example any
		if err := json.Unmarshal(text, &example); err != nil {
			return nil, fmt.Errorf("decode the example of %T: %w", row.example, err)
		}
		docs[huma.DefaultSchemaNamer(reflect.TypeOf(row.example), "")] = schemaDoc{example, row.description}
	}
	return docs, nil
}

// propertyExamples are the examples of fields, by name, that the example of their schema
// does not have.
var propertyExamples = map[string]any{
	"allow_empty": true, "amend": true, "binary": true, "commit": "8f3c1f0e5a4b7d6c9e2f1a0b3c4d5e6f7a8b9c0d", "files": []any{"src/app.js"}, "force": true,
	"original_path": "src/shop.js", "remote": "origin", "submodule": true, "submodules": true,
	"addresses": []any{"192.0.2.0/24"}, "allow_other_image": true, "allow_private": true, "archive_after": "720h", "argv": []any{"npm", "run", "dev"}, "built_in": true, "container_output": "exec: no such file",
	"dropped": 12, "env": map[string]any{"NODE_ENV": "production"}, "error": "the container engine is not available", "exit_code": 1,
	"exited_at": "2026-11-21T09:45:00Z", "flow": "hocl097cxn", "gap": true, "headers": map[string]any{"content-type": "text/plain"},
	"hold_until": "2026-11-21T10:00:00Z", "host": "api.github.com", "inotify_instances": 128, "inotify_watches": 8192, "max_output_bytes": 65536,
	"message_queue_bytes": 819200, "name": "shop", "notes": []any{"the body was not inspected"}, "pending_signals": 512,
	"placeholders": map[string]any{"GITHUB_TOKEN": "github"}, "port": 3000, "ports": []any{"443", "8000-8100"}, "preset": "github",
	"progress": "layer 3 of 7", "reason": "uploads are not allowed", "replaces_built_in": true, "rule": "owner/github", "scheme": "https", "signal": "SIGTERM",
	"status": 404, "stdin": "yes\n", "stream": true, "target": "/srv/shop/current", "unreadable": true, "until": "2026-11-21T10:00:00Z", "user_namespaces": 128,
}

// describeSchemas gives each schema its description and its example, and the example's
// values to fields that have none of their own.
func (d openAPIDocument) describeSchemas(docs map[string]schemaDoc) {
	for name, schema := range d.schemas() {
		doc, ok := docs[name]
		if !ok {
			continue
		}
		schema := schema.(map[string]any)
		schema["description"] = doc.description
		schema["examples"] = []any{doc.example}
		values, _ := doc.example.(map[string]any)
		for name, property := range field(schema, "properties") {
			property := property.(map[string]any)
			items, _ := property["items"].(map[string]any)
			if property["examples"] != nil || property["enum"] != nil || property["$ref"] != nil || items["$ref"] != nil {
				continue
			}
			value, ok := values[name]
			if !ok {
				value, ok = propertyExamples[name]
			}
			if ok {
				property["examples"] = []any{value}
			}
		}
	}
}

// parameterExamples are the examples of parameters, by name.
var parameterExamples = map[string]any{
	"id": "shop", "snapshot": "before-upgrade", "backup": "b4n8r2t6w9xz", "process": "web", "session": "dev", "context": "python", "terminal": "main", "cols": 120, "rows": 40, "since": 5120, "wake": false, "origin": "https://shop.example.com", "command": "htop", "cwd": "/srv/shop", "port": 3000, "path": "/srv/shop/app.js", "mode": "0644", "recursive": true, "hidden": true,
	"label": []any{"team=web"}, "state": "running", "usage": true, "force": true, "signal": "SIGHUP", "cursor": "17", "limit": 100,
	"expires": 1795253340, "signature": "2lVdGvP0x1Zx8t0uWvY7d8Zk3vYqk1mJm8f3wQd0b7E", "disposition": "attachment", "max_bytes": 10485760,
	"staged": true, "max_commits": 10, "from": "main", "to": "HEAD", "ref": "main", "file": []any{"src/app.js"},
	"include": []any{"src/**/*.ts"}, "exclude": []any{".git", "dist"},
	"content": "func main", "literal": true, "ignore_case": true, "max_results": 100, "max_sandboxes": 10,
	"follow": true, "digest": "sha256", "create_new": true, "If-Range": `"5f1d-18c2"`, "Content-Range": "bytes 0-1023/4096",
	"Content-Digest": "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:", "Repr-Digest": "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
	"name": "github", "kind": "request", "verdict": "deny", "host": "*.example.com", "level": "warn",
	"If-Match": `"7"`, "If-None-Match": `"5f1d-18c2"`, "Range": "bytes=0-1023", "Last-Event-ID": "17",
}

// addParameterExamples gives each parameter its example.
func (d openAPIDocument) addParameterExamples() {
	d.eachOperation(func(operation map[string]any) {
		list, _ := operation["parameters"].([]any)
		for _, parameter := range list {
			parameter := parameter.(map[string]any)
			if example, ok := parameterExamples[parameter["name"].(string)]; ok {
				parameter["example"] = example
			}
		}
	})
}

// addBodyExamples gives the JSON and the server-sent events of requests and responses
// the examples of their schemas.
func (d openAPIDocument) addBodyExamples(docs map[string]schemaDoc) {
	add := func(content map[string]any) {
		for _, media := range content {
			media := media.(map[string]any)
			if example := exampleOf(field(media, "schema"), docs); example != nil {
				media["example"] = example
			}
		}
	}
	d.eachOperation(func(operation map[string]any) {
		if body, ok := operation["requestBody"].(map[string]any); ok {
			add(field(body, "content"))
			if body["description"] == nil { // one of a single type
				ref, _ := field(body, "content", "application/json", "schema")["$ref"].(string)
				body["description"] = docs[strings.TrimPrefix(ref, schemasPrefix)].description
			}
		}
		for status, response := range field(operation, "responses") {
			if status >= "400" {
				continue // describeProblems
			}
			if content, ok := response.(map[string]any)["content"].(map[string]any); ok {
				add(content)
			}
		}
	})
}

// exampleOf returns an example of what a schema describes, or nil: of one that is
// described, and of a list or a choice of those.
func exampleOf(schema map[string]any, docs map[string]schemaDoc) any {
	if ref, ok := schema["$ref"].(string); ok {
		return docs[strings.TrimPrefix(ref, schemasPrefix)].example
	}
	for _, choice := range []string{"anyOf", "oneOf"} {
		if alternatives, ok := schema[choice].([]any); ok {
			return exampleOf(alternatives[0].(map[string]any), docs)
		}
	}
	if items, ok := schema["items"].(map[string]any); ok {
		if events, ok := items["oneOf"].([]any); ok {
			return exampleEvents(events, docs)
		}
		if value := exampleOf(items, docs); value != nil {
			return []any{value}
		}
		return nil
	}
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return nil
	}
	object := map[string]any{}
	for name, property := range properties {
		property := property.(map[string]any)
		value := exampleOf(property, docs)
		if values, ok := property["enum"].([]any); ok {
			value = values[0]
		}
		if value == nil {
			return nil
		}
		object[name] = value
	}
	return object
}

// exampleEvents returns an example of one of the events of a stream: the event that the
// data is of, if the data names it.
func exampleEvents(events []any, docs map[string]schemaDoc) any {
	var list any
	for _, schema := range events {
		event, ok := exampleOf(schema.(map[string]any), docs).(map[string]any)
		if !ok {
			continue
		}
		list = []any{event}
		data, _ := event["data"].(map[string]any)
		if name := event["event"]; name == data["type"] || name == data["kind"] {
			break
		}
	}
	return list
}

// describeProblems gives each response with problems an example of each of its codes, and
// the headers that they have.
func (d openAPIDocument) describeProblems() {
	d.eachOperation(func(operation map[string]any) {
		add := func(status string, code problem.Code) {
			definition := code.Definition()
			response := field(operation, "responses", status)
			headers := field(response, "headers")
			headers[problem.HeaderError] = nil
			if definition.RetryAfter > 0 {
				headers["Retry-After"] = nil
			}
			media := field(response, "content", problem.ContentType)
			field(media, "examples")[definition.Name] = map[string]any{"$ref": examplesPrefix + definition.Name}
			field(d, "components", "examples")[definition.Name] = map[string]any{
				"summary":     definition.Title,
				"description": definition.Meaning,
				"value":       problem.New(code, definition.Title).For(exampleRequestID),
			}
		}
		codes, _ := operation[codesExtension].([]any)
		for _, name := range codes {
			var code problem.Code
			if code.UnmarshalText([]byte(name.(string))) == nil && code.Definition().Name != "" {
				add(strconv.Itoa(code.Definition().Status), code)
			}
		}
		add("default", problem.InternalError)
	})
}
