package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// reference writes docs/reference/api.md from the OpenAPI document.
type reference struct {
	bytes.Buffer
	doc struct {
		Tags       []struct{ Name, Description string }
		Paths      map[string]map[string]referenceRoute
		Components struct{ Schemas map[string]schemaMap }
	}
	common []string // codes of nearly all routes
}

type schemaMap = map[string]any

type referenceRoute struct {
	Summary, Description string
	Tags                 []string
	Codes                []string `json:"x-problem-codes"`
	Parameters           []struct {
		Name, In, Description string
		Required              bool
		Schema                schemaMap
	}
	RequestBody struct {
		Content map[string]referenceContent
	}
	Responses map[string]struct {
		Description string
		Content     map[string]referenceContent
	}
}

type referenceContent struct {
	Schema  schemaMap
	Example any
}

// TestReferenceOfRoutes generates the routes, objects and codes of docs/reference/api.md.
func TestReferenceOfRoutes(t *testing.T) {
	_, text := readDocument(t)
	var r reference
	if err := json.Unmarshal(text, &r.doc); err != nil {
		t.Fatal(err)
	}
	r.findCommon()
	const file = "../docs/reference/api.md"
	links := codeLinks(r.common)
	testkit.Generated(t, file, "common codes", strings.Join(links, ", ")+".\n")
	for _, tag := range r.doc.Tags {
		fmt.Fprintf(&r, "\n## %s%s\n\n%s\n", strings.ToUpper(tag.Name[:1]), tag.Name[1:], tag.Description)
		for _, path := range slices.Sorted(maps.Keys(r.doc.Paths)) {
			for _, method := range []string{"get", "post", "put", "patch", "delete"} {
				if route, ok := r.doc.Paths[path][method]; ok && slices.Contains(route.Tags, tag.Name) {
					r.route(strings.ToUpper(method)+" "+path, route)
				}
			}
		}
	}
	testkit.Generated(t, file, "routes", r.String())
	r.Reset()
	for _, name := range slices.Sorted(maps.Keys(r.doc.Components.Schemas)) {
		r.object(name, r.doc.Components.Schemas[name])
	}
	testkit.Generated(t, file, "objects", r.String())
}

// findCommon finds the codes of nearly all routes.
func (r *reference) findCommon() {
	count, routes := map[string]int{}, 0
	for _, methods := range r.doc.Paths {
		for _, route := range methods {
			routes++
			for _, code := range route.Codes {
				count[code]++
			}
		}
	}
	for _, code := range slices.Sorted(maps.Keys(count)) {
		if count[code] >= routes*4/5 {
			r.common = append(r.common, code)
		}
	}
}

func codeLinks(codes []string) (links []string) {
	for _, code := range codes {
		links = append(links, fmt.Sprintf("[`%s`](errors.md#%s)", code, code))
	}
	return links
}

func (r *reference) route(name string, route referenceRoute) {
	fmt.Fprintf(r, "\n### `%s`\n\n%s.", name, route.Summary)
	if route.Description != "" {
		r.WriteString(" " + route.Description)
	}
	r.WriteString("\n")
	head := "\n| parameter | in | type | |\n|---|---|---|---|\n"
	for _, p := range route.Parameters {
		if p.In == "path" && p.Name == "id" {
			continue
		}
		fmt.Fprintf(r, "%s| `%s`%s | %s | %s | %s |\n", head, p.Name, required(p.Required), p.In, typeOf(p.Schema), cell(p.Description))
		head = ""
	}
	for _, kind := range slices.Sorted(maps.Keys(route.RequestBody.Content)) {
		content := route.RequestBody.Content[kind]
		fmt.Fprintf(r, "\nBody: %s\n", bodyType(kind, content.Schema))
		if content.Example != nil && kind == "application/json" {
			r.example(content.Example)
		}
	}
	var results []string
	for _, status := range slices.Sorted(maps.Keys(route.Responses)) {
		response := route.Responses[status]
		if status == "default" || status >= "400" {
			continue
		}
		text := "`" + status + "`"
		if response.Description != "OK" {
			text += " " + response.Description
		}
		var bodies []string
		for _, kind := range slices.Sorted(maps.Keys(response.Content)) {
			bodies = append(bodies, bodyType(kind, response.Content[kind].Schema))
		}
		if len(bodies) > 0 {
			text += ": " + strings.Join(bodies, " or ")
		}
		results = append(results, text)
	}
	fmt.Fprintf(r, "\nResponse: %s\n", strings.Join(results, "; "))
	own := slices.DeleteFunc(slices.Clone(route.Codes), func(code string) bool { return slices.Contains(r.common, code) })
	if slices.Sort(own); len(own) > 0 {
		fmt.Fprintf(r, "\nCodes: %s\n", strings.Join(codeLinks(own), ", "))
	}
}

func (r *reference) object(name string, schema schemaMap) {
	description, _ := schema["description"].(string)
	fmt.Fprintf(r, "\n### Object `%s`\n\n%s\n", name, description)
	fields, _ := schema["properties"].(schemaMap)
	needed, _ := schema["required"].([]any)
	head := "\n| field | type | |\n|---|---|---|\n"
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		property := fields[field].(schemaMap)
		text, _ := property["description"].(string)
		fmt.Fprintf(r, "%s| `%s`%s | %s | %s |\n", head, field, required(slices.Contains(needed, any(field))), typeOf(property), cell(text))
		head = ""
	}
	if len(fields) == 0 {
		fmt.Fprintf(r, "\nType: %s\n", typeOf(schema))
	}
	if examples, _ := schema["examples"].([]any); len(examples) > 0 {
		r.example(examples[0])
	}
}

func (r *reference) example(value any) {
	r.WriteString("\n```json\n")
	encoder := json.NewEncoder(r)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		panic(err)
	}
	r.WriteString("```\n")
}

func required(yes bool) string {
	if yes {
		return " *"
	}
	return ""
}

func cell(text string) string { return strings.NewReplacer("|", `\|`, "\n", " ").Replace(text) }

func bodyType(kind string, schema schemaMap) string {
	if name := typeOf(schema); strings.HasPrefix(name, "[") {
		return name + " (`" + kind + "`)"
	}
	return "`" + kind + "`"
}

// typeOf describes the type of a value, with its limits.
func typeOf(schema schemaMap) string {
	if ref, ok := schema["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, "#/components/schemas/")
		return fmt.Sprintf("[%s](#object-%s)", name, strings.ToLower(name))
	}
	for _, union := range []string{"oneOf", "anyOf"} {
		if list, ok := schema[union].([]any); ok {
			var names []string
			for _, one := range list {
				names = append(names, typeOf(one.(schemaMap)))
			}
			return strings.Join(names, " or ")
		}
	}
	if value, ok := schema["const"]; ok {
		return fmt.Sprintf("`%v`", value)
	}
	if values, ok := schema["enum"].([]any); ok {
		var names []string
		for _, value := range values {
			names = append(names, fmt.Sprintf("`%v`", value))
		}
		return strings.Join(names, ", ")
	}
	kind := ""
	switch value := schema["type"].(type) {
	case string:
		kind = value
	case []any:
		var names []string
		for _, name := range value {
			names = append(names, fmt.Sprint(name))
		}
		kind = strings.Join(names, " or ")
	}
	items, _ := schema["items"].(schemaMap)
	values, _ := schema["additionalProperties"].(schemaMap)
	switch {
	case kind == "array":
		kind = "array of " + typeOf(items)
	case kind == "object" && values != nil:
		kind = "object of " + typeOf(values)
	case schema["format"] == "date-time":
		kind = "time"
	case schema["format"] == "duration":
		kind = "duration"
	case kind == "":
		kind = "any"
	}
	for _, limit := range []struct{ key, text string }{{"minimum", "≥ %v"}, {"maximum", "≤ %v"}, {"default", "default `%v`"}} {
		if value, ok := schema[limit.key]; ok {
			if number, ok := value.(float64); ok && number == float64(int64(number)) {
				value = int64(number)
			}
			kind += ", " + fmt.Sprintf(limit.text, value)
		}
	}
	return kind
}
