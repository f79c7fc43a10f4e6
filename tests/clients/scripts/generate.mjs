// @ai-sdk/anthropic: the same answer, whole and streamed. Arguments: URL of the server, model.
import { createAnthropic } from '@ai-sdk/anthropic';
import { generateText, streamText } from 'ai';

const [url, name] = process.argv.slice(2);
const model = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'unused' })(name);
const asked = { model, prompt: 'Say hello.', maxOutputTokens: 12, temperature: 0 };
const whole = await generateText(asked);
const stream = streamText(asked);
let streamed = '';
for await (const part of stream.textStream) streamed += part;
const used = await stream.usage;
console.log(JSON.stringify({ whole: whole.text, streamed, tokens: [whole.usage, used] }));
